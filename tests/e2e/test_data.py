"""Data of several sources, and orders kept in files: the same losses at every layout, built once, mistakes told."""
import random
import re
import shutil
import struct
import subprocess
import time
import unittest

from invar_job import (ENVIRONMENT, FAILURE_SECONDS, INVAR, LAUNCH, REFERENCE, SMALL, VOCABULARY, JobTest, series,
                       tamper, to_yaml, write_tokens)

USAGE, DATA = 2, 3

LAYOUTS = {
    "alone": ([], None),
    "tensor": (["parallel.tensor=2", "parallel.sequence=true"], 2),
    "data": ([], 2),
    "tensor_data": (["parallel.tensor=2", "parallel.sequence=true"], 4),
}


def write_megatron(prefix, documents):
    """PREFIX.bin and PREFIX.idx of uint16 tokens, one sequence per document."""
    write_tokens(f"{prefix}.bin", [token for document in documents for token in document])
    lengths = [len(document) for document in documents]
    offsets = [2 * sum(lengths[:i]) for i in range(len(lengths))]
    count = len(lengths)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, count, count + 1))
        file.write(struct.pack(f"<{count}i{count}q{count + 1}q", *lengths, *offsets, *range(count + 1)))


class TwoSources(JobTest):
    def setUp(self):
        super().setUp()
        numbers = random.Random(6)
        # Their tokens differ, so that a sample of the wrong source shows in the loss.
        for name, low, high in ("a", 0, 60), ("b", 60, VOCABULARY):
            documents = [[numbers.randrange(low, high) for _ in range(numbers.randrange(1, 60))] for _ in range(30)]
            write_megatron(self.folder / name, documents)

    def config_for(self, kind, blend, **keys):
        own = {"token_dtype": "uint16", "validation_fraction": 0.2} if kind == "tokens" else {"split": '"8, 2"'}
        self.config(data={"kind": kind, "blend": f'"{blend}"', **own, **keys}, optimizer={"lr": 2e-3},
                    train={"eval_every": 3, "eval_batches": 2})


class Blends(TwoSources):
    def check_layouts(self, kind):
        ending = ".bin" if kind == "tokens" else ""
        found = {}
        for name, (overrides, ranks) in LAYOUTS.items():
            self.config_for(kind, f"0.7 a{ending} 0.3 b{ending}")
            found[name] = self.train(f"{kind}_{name}", *overrides, ranks=ranks)
        expected = found["alone"]
        self.assertEqual(len(expected), 6)
        self.assertGreater(max(expected) - min(expected), 1e-2)  # the weights move: there is something to agree on
        for name, losses in found.items():
            with self.subTest(kind, layout=name):
                self.assertEqual(len(losses), len(expected))
                for step, (loss, want) in enumerate(zip(losses, expected), 1):
                    self.assertAlmostEqual(loss, want, delta=1e-5, msg=f"step {step}")
        for other in f"0.3 a{ending} 0.7 b{ending}", f"a{ending} b{ending}", f"1 a{ending}":
            self.config_for(kind, other)
            losses = self.train(f"{kind}_other")
            self.assertGreater(max(abs(loss - want) for loss, want in zip(losses, expected)), 1e-3, other)

    def test_flat_files_train_alike_at_every_layout(self):
        self.check_layouts("tokens")

    def test_megatron_datasets_train_alike_at_every_layout(self):
        self.check_layouts("megatron")

    def test_one_flat_file_is_its_own_blend(self):
        self.config_for("tokens", "2.5 a.bin")
        blend = self.train("blend")
        self.config(data={"kind": "tokens", "path": "a.bin", "token_dtype": "uint16", "validation_fraction": 0.2},
                    optimizer={"lr": 2e-3})
        self.assertEqual(self.train("plain"), blend)

    def test_mistakes_are_told(self):
        self.config_for("tokens", "0.7 a.bin 0 b.bin")
        self.fail_with(USAGE, "run.yaml:", "the weight 0 is not within", "0.7 data/a", arguments=["train", "run.yaml"])
        self.config_for("tokens", "0.7 a.bin 0.3 b.bin", path="a.bin")
        self.fail_with(USAGE, "data.path = a.bin would be ignored with data.blend", arguments=["train", "run.yaml"],
                       ranks=2)
        self.config_for("tokens", "a.bin b.bin", cache_dir="cache")
        self.fail_with(USAGE, "data.cache_dir = cache would be ignored with data.kind: tokens",
                       arguments=["train", "run.yaml"])
        self.config_for("megatron", "0.5 a 0.5 none")
        self.fail_with(DATA, "source 2 of data.blend: none.idx: cannot be opened", arguments=["train", "run.yaml"],
                       ranks=2)


class KeptOrders(TwoSources):
    """data.cache_dir: built by the first rank to come, read by all others and by later runs."""

    RANKS = 4
    ORDERS = 4  # training and validation of two sources

    def train_cached(self, name):
        outcome = self.succeed("train", "run.yaml", f"log.dir={name}", ranks=self.RANKS)
        return len(re.findall("order built and kept as cache/", outcome.stdout + outcome.stderr)), \
            len(re.findall("order read from cache/", outcome.stdout + outcome.stderr))

    def test_ranks_build_once(self):
        self.config_for("megatron", "0.7 a 0.3 b")
        expected = self.train("plain", ranks=self.RANKS)
        self.config_for("megatron", "0.7 a 0.3 b", cache_dir="cache")
        self.assertEqual(self.train("first", ranks=self.RANKS), expected)
        files = sorted((self.folder / "cache").iterdir())
        self.assertEqual(len(files), 5 * self.ORDERS, files)
        self.assertEqual(len([file for file in files if file.name.endswith(".npy")]), 3 * self.ORDERS)
        self.assertFalse([file for file in files if file.name.endswith(".tmp")])
        before = {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}

        self.assertEqual(self.train_cached("second"), (0, self.ORDERS))
        self.assertEqual({file: (file.stat().st_ino, file.stat().st_mtime_ns)
                          for file in (self.folder / "cache").iterdir()}, before)

    def test_a_folder_that_cannot_be_made_is_told(self):
        self.config_for("megatron", "a b", cache_dir="a.bin")
        self.fail_with(USAGE, "data.cache_dir: a.bin", arguments=["train", "run.yaml"], ranks=self.RANKS)


class OtherInputs(JobTest):
    """Two ranks that find other files under one path, as on two hosts: told before the first step."""

    HOSTS = ("one", "two")

    def setUp(self):
        super().setUp()
        for host in self.HOSTS:
            (self.folder / host).mkdir()

    def train_on_hosts(self, sections, *overrides):
        command = list(LAUNCH)
        for host in self.HOSTS:
            folder = self.folder / host
            (folder / "run.yaml").write_text(to_yaml(sections))
            command += [*[":"][:len(command) > len(LAUNCH)], "-n", "1", "-wdir", str(folder), INVAR, "train",
                        "run.yaml", *overrides]
        process = subprocess.Popen(command, env=ENVIRONMENT, text=True, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        return self.finish(process, time.monotonic(), FAILURE_SECONDS)

    def check(self, sections, *expected, overrides=()):
        outcome = self.train_on_hosts(sections, *overrides)
        self.check_failure(outcome, DATA, "rank 1 reads another ", *expected, "all hosts")
        self.assertNotIn("step 1/", outcome.stdout)

    def test_token_files(self):
        sections = {**SMALL, "data": {"kind": "tokens", "path": "d.bin", "token_dtype": "uint16"}}
        tokens = [i % VOCABULARY for i in range(4096)]
        for host in self.HOSTS:
            write_tokens(self.folder / host / "d.bin", tokens)
        outcome = self.train_on_hosts(sections)
        self.assertEqual(outcome.code, 0, outcome)  # equal files
        write_tokens(self.folder / "two" / "d.bin", tokens[:-1] + [0])
        self.check(sections, "d.bin than rank 0: other contents of 8192 bytes")
        write_tokens(self.folder / "two" / "d.bin", tokens[:-1])
        self.check(sections, "d.bin than rank 0: 8190 bytes, where rank 0 has 8192 bytes")

    def test_second_source_of_a_blend(self):
        sections = {**SMALL, "data": {"kind": "megatron", "blend": '"0.5 a 0.5 b"', "split": '"1"'}}
        for host in self.HOSTS:
            for name in "ab":
                write_megatron(self.folder / host / name, [[1, 2, 3] * 40] * 3)
        write_megatron(self.folder / "two" / "b", [[1, 2, 3] * 40, [1, 2, 3] * 39, [1, 2, 3] * 41])
        self.check(sections, "b.idx than rank 0: other contents of")

    def test_weights(self):
        sections = {**SMALL, "model": {"hf_path": "hf", "init": "hf"}}
        for host in self.HOSTS:
            (self.folder / host / "hf").mkdir()
            for name in ("config.json", "model.safetensors"):
                shutil.copy(REFERENCE / "qwen3" / name, self.folder / host / "hf")
        tamper(self.folder / "two/hf/model.safetensors", "model.norm.weight", lambda data: data[:-1] + b"\x40")
        self.check(sections, "hf/model.safetensors than rank 0: other contents")

    def test_checkpoint(self):
        """Of one step and two trainings: before, the parameters of one were updated by the moments of the other."""
        for host, rate in zip(self.HOSTS, ("0.01", "0.02")):
            self.write(f"{host}/run.yaml", to_yaml(SMALL))
            self.succeed("train", f"{host}/run.yaml", f"log.dir={host}/run", "checkpoint.every=3", "train.steps=3",
                         f"optimizer.lr={rate}")
        self.check(SMALL, "run/checkpoints/step_00000003/index.",
                   overrides=["checkpoint.resume=run/checkpoints", "train.steps=5"])


class DocumentEnds(JobTest):
    """data.eod_id: auto, as tools/tokenise, a preset or nobody tells."""

    END = 7

    def train_on(self, name, *overrides, ranks=None):
        outcome = self.succeed("train", "run.yaml", f"log.dir={name}", "data.reset_at_eod=true", *overrides,
                               ranks=ranks)
        return outcome, re.search(r"^  eod_id: (.*)$", (self.folder / name / "config.yaml").read_text(), re.M)[1]

    def setUp(self):
        super().setUp()
        tokens = [self.END if i % 5 == 0 else i % VOCABULARY for i in range(4096)]
        write_tokens(self.folder / "d.bin", tokens)
        self.config(data={"kind": "tokens", "path": "d.bin", "token_dtype": "uint16"})

    def test_beside_the_tokens(self):
        self.write("d.bin.json", f'{{"dtype": "uint16", "eod_id": {self.END}}}')
        outcome, eod_id = self.train_on("auto", ranks=2)
        self.assertEqual(eod_id, str(self.END))
        self.assertNotIn("no document ends", outcome.stdout + outcome.stderr)
        planned = self.succeed("plan", "run.yaml", "--world", 2, "data.reset_at_eod=true").stdout
        self.assertIn(f"documents end     with token {self.END} (data.eod_id)\n", planned)
        self.assertNotIn("documents end", self.succeed("plan", "run.yaml", "--world", 2).stdout)
        self.train_on("explicit", f"data.eod_id={self.END}", ranks=2)
        self.assertEqual(series(self.folder / "auto", "loss"), series(self.folder / "explicit", "loss"))
        self.assertNotEqual(self.train("without", ranks=2), series(self.folder / "auto", "loss"))
        for command, ranks in ((["train", "run.yaml"], 2), (["plan", "run.yaml", "--world", 2], None)):
            self.fail_with(USAGE, "data.eod_id = 3, but d.bin.json says that documents end with token 7",
                           arguments=[*command, "data.reset_at_eod=true", "data.eod_id=3"], ranks=ranks)

    def test_nobody_tells(self):
        for command, ranks in ((["train", "run.yaml"], 2), (["plan", "run.yaml", "--world", 2], None)):
            self.fail_with(USAGE, "data.eod_mask_loss needs data.eod_id", "tools/tokenise",
                           arguments=[*command, "data.eod_mask_loss=true"], ranks=ranks)

    def test_no_document_ends(self):
        for ranks in (None, 2):
            outcome, _ = self.train_on(f"run_{ranks}", f"data.eod_id={VOCABULARY - 1}", "train.steps=3", ranks=ranks)
            said = outcome.stdout + outcome.stderr
            self.assertEqual(said.count(f"warning: no document ends (data.eod_id {VOCABULARY - 1}) in the first 192 "
                                        "tokens"), 1, outcome)


if __name__ == "__main__":
    unittest.main()
