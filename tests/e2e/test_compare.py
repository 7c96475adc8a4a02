"""invar compare: dumps of runs at different layouts, metrics, weights, and what it refuses."""
import json
import re
import resource
import shutil
import signal
import struct
import subprocess
import unittest

from invar_job import (ENVIRONMENT, REFERENCE, RUN_SECONDS, JobTest, command, read_lines, tamper, to_yaml,
                       write_tokens)

OUTSIDE, USAGE, DATA = 1, 2, 3
CASE = REFERENCE / "qwen3"
SEQUENCE, STEPS, STEP = 32, 3, 2

# name: overrides, ranks (None: without mpirun)
LAYOUTS = {
    "tensor_data": (["parallel.tensor=2", "parallel.sequence=true"], 4),
    "uneven": (["parallel.tensor=3", "parallel.uneven=true"], 3),
}


def rows(outcome):
    """Name of a tensor -> its verdict."""
    return {match[1]: match[2] for match in
            re.finditer(r"(?m)^(\S+) +\(.*  (equal|ok|OUTSIDE)$", outcome.stdout)}


def read_safetensors(path):
    """Name -> (dtype, shape, bytes)."""
    data = path.read_bytes()
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:begin])
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], entry["shape"], data[begin + entry["data_offsets"][0]:begin + entry["data_offsets"][1]])
            for name, entry in header.items()}


def write_safetensors(path, tensors):
    header, end = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


class CompareTest(JobTest):
    def setUp(self):
        super().setUp()
        self.write("run.yaml", to_yaml({
            "model": {"hf_path": CASE, "init": "hf"}, "numerics": {"precision": "fp32"}, "optimizer": {"lr": 1e-3},
            "train": {"steps": STEPS, "sequence_length": SEQUENCE, "global_batch_size": 4}}))

    def dump(self, name, *overrides, ranks=None, step=STEP):
        """Trains into the folder `name`; the path of the dump."""
        self.train(name, f"log.dump_step={step}", *overrides, ranks=ranks)
        return f"{name}/dump_step_{step:08}.h5"

    def compare(self, *arguments, code=0):
        outcome = self.run_invar("compare", *arguments)
        self.assertEqual(outcome.code, code, outcome)
        self.assertEqual(outcome.errors, [], outcome)
        return outcome


class Dumps(CompareTest):
    def test_layouts_agree(self):
        alone = self.dump("alone")
        for name, (overrides, ranks) in LAYOUTS.items():
            with self.subTest(name):
                outcome = self.compare(self.dump(name, *overrides, ranks=ranks), alone, "--all")
                verdicts = rows(outcome)
                self.assertEqual(len(verdicts), 4 + 4 + 1 + 4 * 11 + 2, outcome)
                self.assertEqual((verdicts["tokens"], verdicts["labels"]), ("equal", "equal"))
                self.assertEqual(verdicts["hidden.3"], "ok")  # other roundings: the runs are not one and the same
                self.assertIn("55 tensors compared, 0 outside, 0 on one side only", outcome.stdout)
                self.compare(name, "alone")
                self.compare(f"{name}/dump_step_00000002.h5", alone, "--exact", code=OUTSIDE)

    def test_equal_runs_are_equal_to_the_byte(self):
        for name, (overrides, ranks) in {"alone": ([], None), **LAYOUTS}.items():
            with self.subTest(name):
                first, second = (self.dump(f"{name}_{i}", *overrides, ranks=ranks) for i in (1, 2))
                outcome = self.compare(first, second, "--exact", "--all")
                self.assertEqual(set(rows(outcome).values()), {"equal"}, outcome)
                self.assertEqual((self.folder / first).read_bytes(), (self.folder / second).read_bytes())

    def test_other_runs_are_outside(self):
        alone = self.dump("alone")
        seed = rows(self.compare(self.dump("seed", "train.seed=5"), alone, code=OUTSIDE))
        for name in ("tokens", "labels", "loss", "hidden.0", "logits", "grad.model.norm.weight"):
            self.assertEqual(seed[name], "OUTSIDE", name)
        rate = rows(self.compare(self.dump("rate", "optimizer.lr=2e-3"), alone, "--all", code=OUTSIDE))
        self.assertEqual((rate["tokens"], rate["labels"]), ("equal", "equal"))
        for name in ("loss", "hidden.0", "logits", "grad.model.layers.2.mlp.down_proj.weight"):
            self.assertEqual(rate[name], "OUTSIDE", name)
        self.compare(self.dump("rate1", "optimizer.lr=2e-3", step=1), self.dump("alone1", step=1), "--exact")

    def test_only_the_named_step_is_dumped(self):
        self.dump("run")
        self.assertEqual([path.name for path in (self.folder / "run").glob("*.h5*")], ["dump_step_00000002.h5"])
        self.train("none")
        self.assertEqual(list((self.folder / "none").glob("*.h5*")), [])

    def test_a_full_disk_ends_the_run(self):
        def small_files():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

        self.dump("run")
        done = subprocess.run(command(["train", "run.yaml", "log.dir=full", "log.dump_step=2"]), cwd=self.folder,
                              env=ENVIRONMENT, capture_output=True, text=True, timeout=RUN_SECONDS, preexec_fn=small_files)
        self.assertEqual(done.returncode, OUTSIDE, done)  # a fault
        self.assertRegex(done.stderr, "(?m)^invar: error: step 2: full/dump_step_00000002.h5: (dataset '.*': )?"
                                      r"cannot be written: File too large \[")
        self.assertEqual(list((self.folder / "full").glob("*.h5")), [])

    def test_a_step_that_is_not_finite_is_dumped(self):
        case = shutil.copytree(CASE, self.folder / "case")
        for name in ("gate_proj", "up_proj"):  # a product of two that float32 does not hold
            tamper(case / "model.safetensors", f"model.layers.2.mlp.{name}.weight",
                   lambda data: struct.pack("<f", 1e20) * 48 + data[4 * 48:])
        self.fail_with(OUTSIDE, "not finite", arguments=["train", "run.yaml", f"model.hf_path={case}", "log.dir=broken",
                                                         "log.dump_step=1"])
        verdicts = rows(self.compare("broken/dump_step_00000001.h5", self.dump("sound", step=1), code=OUTSIDE))
        self.assertEqual([verdicts[f"hidden.{layer}"] for layer in range(4)], ["equal", "equal", "OUTSIDE", "OUTSIDE"])


class Reference(CompareTest):
    """The dump of a run on the first sample of a reference case."""

    def setUp(self):
        super().setUp()
        tensors = read_safetensors(CASE / "expected.safetensors")
        self.assertEqual(tensors["tokens"][1][2], SEQUENCE + 1)
        sample = struct.unpack(f"<{SEQUENCE + 1}q", tensors["tokens"][2][:8 * (SEQUENCE + 1)])
        write_tokens(self.folder / "sample.bin", sample)
        first = {"tokens": ("I64", [1, 1, SEQUENCE + 1], tensors["tokens"][2][:8 * (SEQUENCE + 1)]),
                 "traj_loss": tensors["traj_loss"]}
        for name, (dtype, shape, data) in tensors.items():
            if name.startswith("hidden.") or name == "logits":
                first[name] = (dtype, [1, *shape[1:]], data[:len(data) // shape[0]])
        write_safetensors(self.folder / "expected.safetensors", first)
        self.overrides = ["data.kind=tokens", "data.path=sample.bin", "data.token_dtype=uint16",
                          "train.global_batch_size=1"]

    def test_activations(self):
        for layout, ranks in (([], None), (["parallel.tensor=3", "parallel.uneven=true"], 3)):
            with self.subTest(ranks=ranks):
                outcome = self.compare(self.dump("run", *self.overrides, *layout, ranks=ranks, step=1), "expected.safetensors")
                self.assertEqual(set(rows(outcome)), {"tokens", "labels", "logits", *(f"hidden.{i}" for i in range(4))})
                self.assertRegex(outcome.stdout, r"(?m)^argmax of the logits: differs at 0 of 32 positions")

    def test_a_wrong_layer_shows_where_it_enters(self):
        case = shutil.copytree(CASE, self.folder / "case")
        tamper(case / "model.safetensors", "model.layers.2.mlp.down_proj.weight",
               lambda data: struct.pack(f"<{len(data) // 4}f", *(1.5 * x for x in struct.unpack(f"<{len(data) // 4}f", data))))
        dump = self.dump("run", *self.overrides, f"model.hf_path={case}", step=1)
        outcome = self.compare(dump, "expected.safetensors", code=OUTSIDE)
        verdicts = rows(outcome)
        self.assertEqual([verdicts[f"hidden.{layer}"] for layer in range(4)], ["ok", "ok", "OUTSIDE", "OUTSIDE"])
        growth = re.search(r"(?m)^hidden\.2 .*e[-+]\d\d +([\d.]+) +\S+e-\d\d +\[0, 0, 0\] ", outcome.stdout)
        self.assertGreater(float(growth[1]), 100, outcome)
        self.assertRegex(outcome.stdout, r"differs at [1-9]\d* of 32 positions \(\d+ near ties, [1-9]\d* real\)")
        self.assertRegex(outcome.stdout, r"(?m)^  \[0, \d+\]: token \d+ in A, \d+ in B; gap .*: real difference$")


class Metrics(CompareTest):
    def test_runs(self):
        self.train("a")
        self.train("b", "parallel.tensor=2", ranks=2)
        self.train("c", "optimizer.lr=2e-3")
        self.compare("a", "a/metrics.jsonl", "--exact")
        self.compare("b", "a")
        outcome = self.compare("c", "a", code=OUTSIDE)
        self.assertRegex(outcome.stdout, r"(?m)^loss +3 .* 2 +2  OUTSIDE$")  # the first step's loss is before its update
        self.assertRegex(outcome.stdout, r"(?m)^tokens +3 .*  equal$")
        self.compare("c", "a", "--rtol", 1.5, "--atol", 0)
        self.train("short", "train.steps=2")
        self.assertIn("1 step only in B: 3", self.compare("short", "a").stdout)

    def test_state_hashes(self):
        hashed = ("log.hash_every=2", "log.hash_blocks=true", "log.every=10")
        layout = ("parallel.tensor=2", "parallel.sequence=true")
        self.train("a", *hashed, *layout, ranks=4)
        self.train("again", *hashed, *layout, ranks=4)
        self.assertEqual(sorted(path.name for path in (self.folder / "a").glob("hash_*")),
                         ["hash_step_00000002.h5", "hash_step_00000003.h5"])  # and the last one
        self.assertIn("state: 2 steps with equal state", self.compare("again", "a", "--exact").stdout)
        for line in read_lines(self.folder / "a/metrics.jsonl"):
            self.assertEqual(list(line["state_hash"]), ["weights", "exp_avg", "exp_avg_sq", "gradients", "combined"])
            for text in line["state_hash"].values():
                self.assertRegex(text, "^[0-9a-f]{16}$")
        self.train("rate", *hashed, *layout, "optimizer.lr=1.00001e-3", ranks=4)
        self.assertIn("state: equal at 0 of 2 hashed steps, first differing at step 2", self.compare("rate", "a").stdout)
        outcome = self.compare("rate", "a", "--exact", code=OUTSIDE)
        self.assertRegex(outcome.stdout, r"(?m)^  weights: \d+ tensors, first model\.embed_tokens\.weight, block 0 \(elements "
                                         r"0 to 4095 of \(250, 48\)\)$")

    def test_a_state_hashes_alike_at_every_layout(self):
        still = ("optimizer.lr=0", "schedule.kind=constant", "log.hash_every=1")
        self.train("alone", *still)
        weights = {line["state_hash"]["weights"] for line in read_lines(self.folder / "alone/metrics.jsonl")}
        self.assertEqual(len(weights), 1)
        for name, (overrides, ranks) in LAYOUTS.items():
            with self.subTest(name):
                self.train(name, *still, *overrides, ranks=ranks)
                lines = read_lines(self.folder / name / "metrics.jsonl")
                self.assertEqual({line["state_hash"]["weights"] for line in lines}, weights)
        self.train("moving", "log.hash_every=1")
        lines = read_lines(self.folder / "moving/metrics.jsonl")
        self.assertEqual(len({line["state_hash"]["weights"] for line in lines} - weights), STEPS)

    def test_a_resumed_run_has_the_hashes_of_an_undisturbed_one(self):
        keys = ("log.hash_every=1", "log.hash_blocks=true", "checkpoint.every=1")
        self.train("whole", *keys)
        self.run_invar("train", "run.yaml", "log.dir=parts", *keys, "train.exit_after_steps=2")
        self.train("parts", *keys)
        self.assertIn("state: 3 steps with equal state", self.compare("parts", "whole", "--exact").stdout)
        for name in ("state_hashes.jsonl", "hash_step_00000003.h5"):
            self.assertEqual((self.folder / "parts" / name).read_bytes(), (self.folder / "whole" / name).read_bytes())


class Weights(CompareTest):
    def test_folders(self):
        case = shutil.copytree(CASE, self.folder / "case")
        self.compare("case", CASE / "model.safetensors", "--exact")
        tamper(case / "model.safetensors", "model.layers.3.self_attn.q_norm.weight",
               lambda data: data[:4] + struct.pack("<f", 7) + data[8:])
        outcome = self.compare("case", CASE, code=OUTSIDE)
        self.assertRegex(outcome.stdout, r"(?m)^model.layers.3.self_attn.q_norm.weight .* \[1\] +OUTSIDE$")
        self.assertIn("1 outside", outcome.stdout)
        tensors = read_safetensors(CASE / "model.safetensors")
        tensors.pop("model.norm.weight")
        write_safetensors(self.folder / "less.safetensors", tensors)
        self.assertIn("only in B: model.norm.weight", self.compare("less.safetensors", CASE, code=OUTSIDE).stdout)


class Refusals(CompareTest):
    def test_usage(self):
        self.train("run")
        metrics, weights = "run/metrics.jsonl", CASE
        for arguments, texts in (((metrics, weights), ("metrics", "safetensors", "cannot be compared")),
                                 ((metrics, metrics, "--exact", "--rtol", 0), ("--exact",)),
                                 ((metrics, metrics, "--atol", -1), ("-1", "at least 0")),
                                 ((metrics, metrics, "--rtol", "nan"), ("nan", "at least 0")),
                                 (("run/log.txt", metrics), ("log.txt", ".safetensors")),
                                 ((metrics,), ("B",))):
            with self.subTest(arguments):
                self.fail_with(USAGE, *texts, arguments=["compare", *arguments])
        self.fail_with(USAGE, "compare runs in one process", "without mpirun", arguments=["compare", "run", "run"], ranks=2)

    def test_files_that_cannot_be_read(self):
        dump = self.dump("run")
        whole = (self.folder / dump).read_bytes()
        (self.folder / "cut.h5").write_bytes(whole[:len(whole) // 2])
        (self.folder / "text.h5").write_text("hello\n")
        (self.folder / "empty").mkdir()
        for path, text in (("cut.h5", "truncated"), ("text.h5", "not an HDF5 file"), ("nowhere.h5", "No such file"),
                           ("nowhere", "no such file"), ("empty", "model.safetensors")):
            with self.subTest(path):
                self.fail_with(DATA, path, text, arguments=["compare", path, dump], hint=False)

    def test_dump_keys(self):
        self.fail_with(USAGE, "log.dump_step = 2 needs log.dir", arguments=["train", "run.yaml", "log.dump_step=2"])
        self.fail_with(USAGE, "log.dump_step = 4 is beyond train.steps = 3",
                       arguments=["train", "run.yaml", "log.dir=x", "log.dump_step=4"], ranks=2)


if __name__ == "__main__":
    unittest.main()
