"""How invar fails: one message for a person on one rank, the exit code, and an end within seconds at every layout."""
import os
import re
import shutil
import signal
import struct
import time
import unittest

import invar_job
from invar_job import (FAILURE_SECONDS, PROMISED_SECONDS, REFERENCE, SEQUENCE, SMALL, VOCABULARY, JobTest, to_yaml,
                       write_tokens)

USAGE, DATA, FAULT = 2, 3, 1


class ConfigFile(JobTest):
    """A mistake in the file: alone and on three ranks, before anything is computed."""

    GOOD = to_yaml({**SMALL, "train": {**SMALL["train"], "global_batch_size": 12}})

    def line_of(self, text, key):
        """Number of the last line that gives this key."""
        numbers = [number for number, line in enumerate(text.splitlines(), 1) if line.strip().startswith(key)]
        return numbers[-1]

    def refuse(self, text, *expected, key=None):
        name = self.write("bad.yaml", text)
        place = f"bad.yaml:{self.line_of(text, key)}: " if key else "bad.yaml"
        for ranks in (None, 3):
            with self.subTest(ranks=ranks):
                outcome = self.fail_with(USAGE, place, *expected, arguments=["train", name], ranks=ranks)
                self.assertEqual(outcome.stdout, "")

    def test_good_file_passes(self):  # so that none of the refusals below has another reason
        outcome = self.succeed("train", self.write("good.yaml", self.GOOD), "train.steps=1")
        self.assertIn("step 1/1 | loss", outcome.stdout)

    def test_misspelt_key(self):
        text = self.GOOD.replace("hidden_size", "hiden_size")
        self.refuse(text, "unknown key model.hiden_size", "did you mean model.hidden_size?", key="hiden_size")

    def test_key_twice(self):
        text = self.GOOD.replace("  steps: 6\n", "  steps: 6\n  seed: 1\n  steps: 6\n")
        first = self.line_of(self.GOOD, "steps")
        self.refuse(text, f"train.steps is given twice, first at line {first}", "keep one", key="steps")

    def test_section_twice(self):
        first = self.line_of(self.GOOD, "train")
        self.refuse(self.GOOD + "train:\n  seed: 1\n", f"train is given twice, first at line {first}", key="train")

    def test_quoted_number(self):
        text = self.GOOD.replace("steps: 6", 'steps: "6"')
        self.refuse(text, 'train.steps is a quoted string: "6"', "write 6", key="steps")

    def test_wrong_type(self):
        self.refuse(self.GOOD.replace("steps: 6", "steps: ten"), "train.steps must be an integer, not ten",
                    key="steps")

    def test_unknown_section(self):
        self.refuse(self.GOOD.replace("numerics:", "numerix:"), "unknown section numerix", "did you mean numerics?",
                    key="numerix")

    def test_tab_indent(self):
        self.refuse(self.GOOD.replace("  steps: 6", "\tsteps: 6"), "tab", "indent with spaces", key="steps")

    def test_empty_file(self):
        self.refuse("", "the config file is empty", "configs/quickstart.yaml")

    def test_ignored_key(self):
        text = self.GOOD + "schedule:\n  min_lr: 1e-5\n"
        self.refuse(text, "schedule.min_lr", "would be ignored", "remove", key="min_lr")

    def test_missing_file(self):
        for ranks in (None, 3):
            self.fail_with(USAGE, "nowhere.yaml", arguments=["train", "nowhere.yaml"], ranks=ranks)


class Override(JobTest):
    def test_bad_overrides(self):
        cases = {
            "train.stepz=3": ("unknown key train.stepz", "did you mean train.steps?"),
            "train.steps": ("section.key=value",),
            "train.steps=1.5": ("must be an integer, not 1.5",),
            "trian.steps=3": ("trian", "did you mean train?"),
            'train.steps="3"': ("quoted string",),
        }
        for argument, expected in cases.items():
            with self.subTest(argument):
                self.fail_with(USAGE, f"argument {argument}: ", *expected,
                               arguments=["train", self.config(), argument])

    def test_on_ranks(self):
        self.fail_with(USAGE, "argument train.steps=3: ", "given twice, first by train.steps=2",
                       arguments=["train", self.config(), "train.steps=2", "train.steps=3"], ranks=3)


class Usage(JobTest):
    def test_no_arguments(self):
        for ranks in (None, 3):
            self.fail_with(USAGE, "subcommand is required", "invar --help", arguments=[], ranks=ranks)

    def test_unknown_subcommand(self):
        for ranks in (None, 3):
            self.fail_with(USAGE, "unknown subcommand tarin", "did you mean train?", arguments=["tarin"], ranks=ranks)
        self.fail_with(USAGE, "subcommand is required",
                       arguments=["--bogus"])

    def test_missing_arguments(self):
        self.fail_with(USAGE, "config is required", arguments=["train"])
        self.fail_with(USAGE, "--world is required", arguments=["plan", self.config()])
        self.fail_with(USAGE, "--world", arguments=["plan", self.config(), "--world", "0"])

    def test_help_is_printed_once(self):
        for ranks in (None, 3):
            outcome = self.succeed("--help", ranks=ranks)
            self.assertEqual(outcome.stdout.count("Usage:"), 1, outcome)
            for subcommand in ("train", "plan", "parity", "keys"):
                self.assertRegex(outcome.stdout, rf"(?m)^\s+{subcommand}\s")

    def test_foreign_launcher(self):
        """Started by the mpirun of another MPI, every process would train the whole job by itself."""
        environment = invar_job.ENVIRONMENT
        self.addCleanup(setattr, invar_job, "ENVIRONMENT", environment)
        invar_job.ENVIRONMENT = {**environment, "MV2_COMM_WORLD_SIZE": "4"}
        self.fail_with(USAGE, "started 4 processes, but MPI sees one", arguments=["train", self.config()])


class Layout(JobTest):
    """Rules of the layout; `plan` refuses what `train` refuses, with the same words."""

    def refuse(self, ranks, *expected, **sections):
        config = self.config(**sections)
        trained = self.fail_with(USAGE, *expected, arguments=["train", config], ranks=ranks)
        planned = self.fail_with(USAGE, *expected, arguments=["plan", config, "--world", ranks])
        self.assertEqual(trained.errors, planned.errors)

    def test_wrong_world_size(self):
        self.refuse(3, "run.yaml:", "2 · 1 · 2 = 4, but the job has 3 ranks", "mpirun -n 4",
                    parallel={"tensor": 2, "data": 2})

    def test_world_that_does_not_divide(self):
        self.refuse(3, "run.yaml:", "3 ranks cannot be cut into replicas", "start 2, 4, 6",
                    parallel={"tensor": 2})

    def test_six_heads_on_four_ranks(self):
        self.refuse(4, "run.yaml:", "parallel.tensor = 4 does not divide 6 query heads", "use 1, 2, 3 or 6",
                    "parallel.uneven: true", model={"num_attention_heads": 6, "num_key_value_heads": 6},
                    parallel={"tensor": 4})

    def test_three_ranks_without_uneven(self):
        self.refuse(3, "run.yaml:", "parallel.tensor = 3 does not divide 8 query heads", "use 1, 2, 4 or 8",
                    "parallel.uneven: true", parallel={"tensor": 3})

    def test_global_batch(self):
        self.refuse(3, "run.yaml:", "train.global_batch_size = 4 is not a multiple", "use 3 or 6")

    def test_invariant_numerics(self):
        """Ranks hold whole leaves and workers of the small model's four KV heads and four samples."""
        invariant = {"reduction": "invariant", "workers": 4}
        self.refuse(2, "run.yaml:", "numerics.workers = 8 exceeds train.global_batch_size = 4", "use at most 4",
                    numerics={"reduction": "invariant"})
        self.refuse(2, "run.yaml:", "numerics.leaves = 4 would be ignored with numerics.reduction: fast",
                    "remove numerics.leaves", numerics={"leaves": 4})
        self.refuse(8, "run.yaml:", "parallel.tensor = 8 exceeds 4 leaves", "use 1, 2 or 4", "or numerics.leaves: 8 (other bits)",
                    numerics={**invariant, "leaves": 4}, parallel={"tensor": 8})
        self.refuse(3, "run.yaml:", "parallel.tensor = 3 does not divide 4 leaves of 4 key and value heads equally",
                    "parallel.uneven: true", numerics=invariant, parallel={"tensor": 3})
        self.refuse(2, "run.yaml:", "parallel.data = 2: its ranks hold 2 of 4 samples each, not whole workers",
                    "use parallel.data 1, or numerics.workers: 2", numerics={**invariant, "workers": 1})

    def test_cuda(self):
        for arguments in (["train", self.config(), "device=cuda"], ["parity", REFERENCE / "qwen3", "device=cuda"]):
            for ranks in (None, 2):
                self.fail_with(USAGE, "device = cuda", "without CUDA", "device: cpu", arguments=arguments, ranks=ranks)


class PrintingCommands(JobTest):
    """plan and keys compute nothing in parallel; under mpirun rank 0 speaks for all."""

    def test_plan_is_printed_once(self):
        config = self.config(parallel={"tensor": 2})
        alone = self.succeed("plan", config, "--world", 4)
        self.assertEqual(alone.stdout.count("memory per rank"), 1)
        self.assertEqual(self.succeed("plan", config, "--world", 4, ranks=3).stdout, alone.stdout)

    def test_plan_is_refused_once(self):
        config = self.config(parallel={"tensor": 3})
        for code, expected, arguments in ((USAGE, "parallel.tensor = 3 does not divide", [config]),
                                          (USAGE, "nowhere.yaml", ["nowhere.yaml"])):
            outcome = self.fail_with(code, expected, arguments=["plan", *arguments, "--world", 3], ranks=3)
            self.assertEqual(outcome.stdout, "")

    def test_keys_are_printed_once(self):
        alone = self.succeed("keys")
        self.assertEqual(alone.stdout.count("end-of-document token"), 1)
        self.assertEqual(self.succeed("keys", ranks=3).stdout, alone.stdout)


class TokenIds(JobTest):
    """An id past the vocabulary, in a file of 16 samples of which every step reads four."""

    SAMPLES = 16
    LAYOUTS = ({"tensor": 2, "data": 2}, {"tensor": 1, "data": 4}, {"tensor": 2, "data": 1}, {"tensor": 1, "data": 1})

    def write_data(self, bad_sample):
        tokens = [i % VOCABULARY for i in range(self.SAMPLES * SEQUENCE + 1)]
        position = bad_sample * SEQUENCE + SEQUENCE // 2  # inside: the next sample does not read it
        tokens[position] = VOCABULARY
        write_tokens(self.folder / "bad.bin", tokens)
        return position

    def config_for(self, layout, **train):
        return self.config(parallel=layout, train={"steps": 4, **train},
                           data={"kind": "tokens", "path": "bad.bin", "token_dtype": "uint16"})

    def ranks_of(self, layout):
        world = layout["tensor"] * layout["data"]
        return world if world > 1 else None

    def test_found_by_all(self):
        write_tokens(self.folder / "bad.bin", [VOCABULARY] * (self.SAMPLES * SEQUENCE + 1))
        for layout in self.LAYOUTS:
            with self.subTest(layout=layout):
                ranks = self.ranks_of(layout)
                self.fail_with(DATA, "error: rank 0: step 1: " if ranks else "error: step 1: ", "bad.bin",
                               f"has id {VOCABULARY}, outside the vocabulary [0, {VOCABULARY})", "vocab_size",
                               arguments=["train", self.config_for(layout)], ranks=ranks)

    def order_of(self, sample):
        """When this sample's turn comes, by a run alone that reads one sample a step."""
        position = self.write_data(sample)
        config = self.config_for({"tensor": 1}, steps=self.SAMPLES, global_batch_size=1)
        outcome = self.fail_with(DATA, f"token {position} has id", arguments=["train", config])
        return position, int(re.search(r"step (\d+):", outcome.errors[0]).group(1)) - 1

    def test_found_by_one_replica_at_a_later_step(self):
        """The others wait in a collective for the replica that ends the job."""
        position, turn = next((position, turn) for position, turn in map(self.order_of, range(self.SAMPLES))
                              if turn >= 8 and turn % 4 == 2)
        step = turn // 4 + 1
        for layout in self.LAYOUTS:
            with self.subTest(layout=layout):
                ranks = self.ranks_of(layout)
                replica = turn % 4 // (4 // layout["data"])
                who = f"rank {replica * layout['tensor']}: " if ranks else ""
                outcome = self.fail_with(
                    DATA, f"invar: error: {who}step {step}: token file bad.bin: token {position} has id {VOCABULARY},",
                    arguments=["train", self.config_for(layout)], ranks=ranks)
                self.assertIn(f"step {step - 1}/4 | loss", outcome.stdout)  # the steps before it were trained


class Files(JobTest):
    """Data and weights that cannot be used: exit code 3."""

    def both(self, *expected, arguments):
        for ranks in (None, 2):
            with self.subTest(ranks=ranks):
                self.fail_with(DATA, *expected, arguments=arguments, ranks=ranks)

    def hf_folder(self):
        folder = self.folder / "weights"
        folder.mkdir()
        for name in ("config.json", "model.safetensors"):
            shutil.copy(REFERENCE / "qwen3" / name, folder)
        return folder

    def hf_config(self, **model):
        return self.write("run.yaml", to_yaml({**SMALL, "model": {"hf_path": "weights", "init": "hf", **model}}))

    def test_missing_tokens(self):
        config = self.config(data={"kind": "tokens", "path": "nowhere.bin", "token_dtype": "uint16"})
        self.both("nowhere.bin", "No such file", "data.path", arguments=["train", config])

    def test_too_few_tokens(self):
        write_tokens(self.folder / "short.bin", [1] * SEQUENCE)
        config = self.config(data={"kind": "tokens", "path": "short.bin", "token_dtype": "uint16"})
        self.both("short.bin", f"{SEQUENCE} of {SEQUENCE} tokens", f"= {SEQUENCE + 1}", arguments=["train", config])

    def test_corrupt_megatron_index(self):
        config = self.config(data={"kind": "megatron", "path": "corpus"})
        write_tokens(self.folder / "corpus.bin", [1] * 64)
        header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2)
        self.write_bytes("corpus.idx", b"not an index" * 10)
        self.both("corpus.idx", "does not begin with MMIDIDX", arguments=["train", config])
        self.write_bytes("corpus.idx", header + struct.pack("<iqqq", 65, 0, 0, 1))
        self.both("corpus.bin", "65 uint16 tokens", arguments=["train", config])
        self.write_bytes("corpus.idx", header + struct.pack("<iqq", 64, 0, 0))
        self.both("corpus.idx", "do not fit", "truncated", arguments=["train", config])

    def write_bytes(self, name, data):
        (self.folder / name).write_bytes(data)

    def test_folder_without_weights(self):
        (self.hf_folder() / "model.safetensors").unlink()
        self.both("weights", "model.safetensors", arguments=["train", self.hf_config()])

    def test_weights_of_another_shape(self):
        self.hf_folder()
        self.both("model.safetensors", "'model.layers.0.mlp.", "has shape (96, 48), the model needs (128, 48)",
                  arguments=["train", self.hf_config(intermediate_size=128)])

    def test_truncated_weights(self):
        path = self.hf_folder() / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        self.both("model.safetensors", "tensor '", "out of range", arguments=["train", self.hf_config()])
        path.write_bytes(path.read_bytes()[:100])
        self.both("model.safetensors", "in a file of 100", "damaged", arguments=["train", self.hf_config()])


class RunFolders(JobTest):
    """A file where a folder must be. Root may write anywhere, so permissions cannot be tried."""

    def test_log_dir(self):
        self.write("file", "in the way")
        for ranks in (None, 2):
            for path in ("file", "file/run"):
                self.fail_with(USAGE, path, "Not a directory", arguments=["train", self.config(), f"log.dir={path}"],
                               ranks=ranks)

    def test_export_dir_is_refused_before_training(self):
        self.write("file", "in the way")
        for ranks in (None, 2):
            outcome = self.fail_with(USAGE, "checkpoint.export_dir = file/export", "folder",
                                     arguments=["train", self.config(), "checkpoint.export_dir=file/export"],
                                     ranks=ranks)
            self.assertNotIn("loss", outcome.stdout)

    def test_export_overwrites_no_weights(self):
        (self.folder / "export").mkdir()
        self.write("export/model-00001-of-00002.safetensors", "weights of another run")
        for ranks in (None, 2):
            outcome = self.fail_with(USAGE, "checkpoint.export_dir = export holds model-00001-of-00002.safetensors",
                                     "without weights",
                                     arguments=["train", self.config(), "checkpoint.export_dir=export"], ranks=ranks)
            self.assertNotIn("loss", outcome.stdout)


class NotFinite(JobTest):
    def test_absurd_learning_rate(self):
        for layout, ranks in (({}, None), ({}, 2), ({"tensor": 2, "sequence": "true"}, 2)):
            with self.subTest(layout=layout, ranks=ranks):
                config = self.config(parallel=layout, optimizer={"lr": 1e30})
                outcome = self.fail_with(FAULT, "step 2: ", "not finite", "lower optimizer.lr",
                                         arguments=["train", config], ranks=ranks)
                self.assertIn("step 1/6 | loss", outcome.stdout)


class KillTest(JobTest):
    """A rank that is killed from outside says nothing; mpirun ends the others, which hang in a collective."""

    def kill_one(self, layout, ranks, victim):
        pause = self.pause_at_step("run", 3)
        process = self.start("train", self.config(parallel=layout), "log.dir=run", ranks=ranks, pauses=[pause])
        self.reach(pause, process)
        pids = invar_job.ids_of(process)
        self.assertEqual(len(pids), ranks)
        os.kill(pids[victim], signal.SIGKILL)
        since = time.monotonic()
        pause.release()
        outcome = self.finish(process, since, FAILURE_SECONDS)
        self.assertNotEqual(outcome.code, 0, outcome)
        self.assertIn("signal 9", outcome.stderr)
        self.check_gone(pids)
        return outcome


class Killed(KillTest):
    def test_tensor_rank(self):
        self.kill_one({"tensor": 2, "sequence": "true"}, 2, victim=0)

    def test_data_rank(self):
        self.kill_one({"tensor": 2}, 4, victim=3)


class Promise(KillTest):
    """A job that fails ends within ten seconds, beside what a job takes here and now that does not fail. Other
    processes may hold up one job or the other, not three times."""

    TRIES = 3

    def within_the_promise(self, fail):
        """fail: () -> Outcome of a job of four ranks."""
        for _ in range(self.TRIES):
            good = self.succeed("train", self.config(), "train.steps=1", ranks=4)
            outcome = fail()
            if outcome.seconds < good.seconds + PROMISED_SECONDS:
                return
        self.fail(f"{outcome.seconds:.1f} s, and a job that does not fail takes {good.seconds:.1f} s\n{outcome}")

    def test_config_error(self):
        self.within_the_promise(lambda: self.fail_with(USAGE, "unknown key", ranks=4,
                                                       arguments=["train", self.config(), "train.stepz=3"]))

    def test_data_error_of_one_rank(self):
        tokens = [i % VOCABULARY for i in range(4 * SEQUENCE + 1)]
        tokens[SEQUENCE // 2] = VOCABULARY  # of one sample of four, of which each rank trains on one
        write_tokens(self.folder / "bad.bin", tokens)
        data = {"kind": "tokens", "path": "bad.bin", "token_dtype": "uint16"}
        self.within_the_promise(lambda: self.fail_with(DATA, "outside the vocabulary", ranks=4,
                                                       arguments=["train", self.config(data=data)]))

    def test_killed_rank(self):
        self.within_the_promise(lambda: self.kill_one({"tensor": 2}, 4, victim=3))


if __name__ == "__main__":
    unittest.main()
