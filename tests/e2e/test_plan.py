"""invar plan: the counts of every config, memory per rank, and what it refuses."""
import re
import resource
import socket
import subprocess
import unittest

import invar_job
from invar_job import ROOT, JobTest, to_yaml

USAGE = 2


WIDE = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64}  # so that 0.1 MiB is little


class Plan(JobTest):
    # Hugging Face's counts of the models, Gemma's without its layer scalars, which are buffers there.
    PARAMETERS = {"gemma4_e2b": 4628569344, "gemma4_e4b": 7463013376, "gemma4_12b": 11907350272,
                  "gemma4_31b": 30697345280, "qwen3_0.6b": 596049920, "qwen3_1.7b": 1720574976, "qwen3_4b": 4022468096, "qwen3_8b": 8190735360,
                  "qwen3_14b": 14768307200, "qwen3_32b": 32762123264}

    def plan(self, config, world, *overrides):
        """In 1 GiB of address space: nothing of the model's size is allocated."""
        arguments = invar_job.command(["plan", config, "--world", world, *overrides])
        limit = resource.RLIM_INFINITY if invar_job.SANITIZED else 1 << 30
        done = subprocess.run(arguments, env=invar_job.ENVIRONMENT, capture_output=True, text=True,
                              timeout=invar_job.RUN_SECONDS,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
        return invar_job.Outcome(done.returncode, done.stdout, done.stderr, 0)

    def memory_of_first_rank(self, config, world, *overrides):
        """MiB by kind."""
        outcome = self.plan(config, world, *overrides)
        self.assertEqual(outcome.code, 0, outcome)
        kinds, row = re.search(r"^rank +(.*) total +holds$\n +0 +(.*)$", outcome.stdout, re.M).groups()
        return dict(zip(kinds.split(), map(float, row.split())))

    def test_every_config(self):
        configs = sorted((ROOT / "configs").glob("*.yaml"))
        self.assertGreaterEqual(len(configs), len(self.PARAMETERS) + 1)
        for config in configs:
            for world in (1, 8, 64):
                with self.subTest(config.name, world=world):
                    # One rank cannot be cut, and the small configs have too few samples for 64 replicas.
                    fit = ["parallel.tensor=1", "parallel.sequence=false"] if world == 1 else []
                    if config.stem not in self.PARAMETERS:
                        fit.append("train.global_batch_size=auto")
                    outcome = self.plan(config, world, *fit)
                    self.assertEqual(outcome.code, 0, outcome)
                    self.assertRegex(outcome.stdout, rf"(?m)^ranks +{world} = tensor \d+ x data \d+$")
                    found = re.search(r"^parameters +([\d,]+)( and \d+ untrained)?$", outcome.stdout, re.M)
                    count = int(found[1].replace(",", ""))
                    self.assertEqual(count, self.PARAMETERS.get(config.stem, count))

    def small(self):
        self.write("small.yaml", to_yaml({
            "model": {"vocab_size": 250, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
                      "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
            "train": {"steps": 3, "sequence_length": 32}}))
        return self.folder / "small.yaml"

    def test_sizes_that_no_machine_has(self):
        """Refused, or planned, at once: as numbers the largest ones are as good as small ones."""
        for override in ("model.num_hidden_layers=1000000", "model.intermediate_size=2147483647",
                         "train.micro_batch_size=2147483647"):
            outcome = self.plan(self.small(), 1, override)
            self.assertEqual(outcome.code, USAGE, outcome)
            self.assertIn(f"argument {override}: ", outcome.stderr)
        for overrides in (["train.micro_batch_size=1000000"],
                          ["numerics.reduction=invariant", "train.global_batch_size=16777216"]):
            outcome = self.plan(self.small(), 1, "device=cpu", *overrides)
            self.assertEqual(outcome.code, 0, outcome)

    def test_memory_that_the_host_does_not_have(self):
        outcome = self.run_invar("train", self.small(), "device=cpu",
                                 "train.micro_batch_size=10000000")
        self.assertEqual(outcome.code, 1, outcome)
        self.assertRegex(outcome.stderr, r"out of memory: a rank needs \d+\.\d MiB \(.*\); the host has \d+\.\d MiB left")
        outcome = self.run_invar("train", self.small(), "device=cpu", "parallel.data=2",
                                 "train.micro_batch_size=8000000", ranks=2)
        self.check_failure(outcome, 1, ", the 2 ranks of this host ")

    def test_tensor_parallelism_shares_the_per_layer_table(self):
        """2.8 of E4B's 7.5 billion parameters: were each rank to hold them all, memory would not fall like this."""
        held = {}
        for tensor in (1, 2, 4, 8):
            out = self.plan(ROOT / "configs" / "gemma4_e4b.yaml", 8, f"parallel.tensor={tensor}",
                            f"parallel.sequence={'true' if tensor > 1 else 'false'}").stdout
            held[tensor] = float(re.search(r"^ +0 +([\d.]+)", out, re.M)[1])
            self.assertIn(f"per-layer   0-{256 // tensor - 1}", out)
        for tensor in (2, 4, 8):
            self.assertLess(held[tensor], 1.1 * held[1] / tensor)  # beyond two ranks KV heads are copied

    def test_refuses_bad_worlds(self):
        config = ROOT / "configs" / "qwen3_8b.yaml"
        for world, expected in ((3, "3 ranks cannot be cut"), (6, "6 ranks cannot be cut"), (0, "--world"),
                                (-4, "--world"), ("many", "--world")):
            with self.subTest(world=world):
                self.check_failure(self.plan(config, world), USAGE, expected)
        self.check_failure(self.plan(config, 12, "parallel.tensor=3"), USAGE, "parallel.tensor = 3 does not divide")

    def test_memory_is_what_a_run_takes(self):
        for layout, ranks in (({}, None), ({"tensor": 2, "sequence": "true"}, 4), ({"tensor": 3, "uneven": "true"}, 3)):
            with self.subTest(layout=layout):
                config = self.config(parallel=layout, model=WIDE, train={"steps": 1})
                run = self.succeed("train", config, ranks=ranks).stdout
                found = re.search(r"memory of rank 0: (\S+) MiB \(parameters (\S+) MiB, gradients (\S+) MiB, "
                                  r"optimizer (\S+) MiB, activations (\S+) MiB", run)
                planned = self.succeed("plan", self.folder / config, "--world", ranks or 1).stdout
                row = re.search(r"^ +0((?: +[\d.]+){7})  q", planned, re.M)[1].split()
                self.assertEqual(list(found.groups()), [row[6], *row[:4]])
                self.assertGreater(float(row[6]), 10)

    def test_recomputation_takes_time_and_gathers_for_memory(self):
        for layout in ({}, {"tensor": 2}, {"tensor": 2, "sequence": "true"}):
            config = self.config(parallel=layout, model=WIDE, train={"steps": 1})
            activations, gathers = {}, {}
            for kind in ("none", "selective", "full"):
                planned = self.succeed("plan", self.folder / config, "--world", layout.get("tensor", 1),
                                       f"train.recompute={kind}").stdout
                activations[kind] = float(re.search(r"^ +0((?: +[\d.]+){7})  q", planned, re.M)[1].split()[3])
                gathers[kind] = sum(map(int, re.findall(r"tensor all_gather +(\d+) calls", planned)))
            self.assertLess(activations["full"], activations["selective"], layout)
            self.assertLess(activations["selective"], activations["none"], layout)
            layers = int(invar_job.MODEL["num_hidden_layers"])
            self.assertEqual(gathers["selective"] - gathers["none"], 2 * layers if "sequence" in layout else 0, layout)

    def test_invariant_numerics(self):
        config = ROOT / "configs" / "qwen3_8b.yaml"
        recipe = ["device=cpu", "train.sequence_length=4096", "train.micro_batch_size=1", "train.global_batch_size=64",
                  "numerics.precision=bf16"]
        layout = ["parallel.tensor=3", "parallel.uneven=true", "parallel.data=4"]
        invariant = "numerics.reduction=invariant"
        self.assertNotIn("contract", self.plan(config, 12, *recipe, *layout).stdout)
        outcome = self.plan(config, 12, *recipe, *layout, invariant, "numerics.workers=16")
        self.assertEqual(outcome.code, 0, outcome)
        rows = {name: rest.split() for name, rest in re.findall(r"^  (\S.*?)  +(\d.*)$", outcome.stdout, re.M)}
        # Leaves 0-2, 3-5, 6-7 of a tree over 8: [0,2) [2,3), [3,4) [4,6), [6,8).
        shares = ["3", "3", "2", "(2", "2", "1", "nodes)"]
        self.assertEqual(rows["key and value heads"], ["8", "8", *shares])
        self.assertEqual(rows["FFN blocks"], ["384", "8", *shares])
        self.assertEqual(rows["vocabulary units"], ["9496", "8", *shares])
        self.assertEqual(rows["samples, by workers"], ["64", "16", *"4 4 4 4 (1 1 1 1 nodes)".split()])
        self.assertIn("gradient buffers in use: at most 3 a data rank", outcome.stdout)
        others = [item for item in recipe if not item.startswith("train.micro_batch_size")]
        for micro_batch, buffers in (2, 3), (4, 2), (16, 1):  # sums that end with a micro-batch or before have none
            self.assertIn(f"gradient buffers in use: at most {buffers} a data rank",
                          self.plan(config, 12, f"train.micro_batch_size={micro_batch}", *others, *layout, invariant,
                                    "numerics.workers=16").stdout)
        gradients = {micro_batch: self.memory_of_first_rank(config, 1, f"train.micro_batch_size={micro_batch}", *others,
                                                            "parallel.tensor=1", "parallel.sequence=false", invariant,
                                                            "numerics.workers=16")["gradients"]
                     for micro_batch in (4, 64)}
        self.assertAlmostEqual(gradients[4], 4 * gradients[64], delta=1)
        self.assertIn("parallel.tensor 1, 2, 4 or 8, or with uneven 1, 2, 3, 4, 5, 6, 7 or 8; parallel.data 1, 2, 4, 8 or 16\n",
                      outcome.stdout)
        contract = re.search(r"^numerics contract ([0-9a-f]{16}): version 2, precision bf16, arithmetic fma-chain, leaves 8, "
                             r"workers 16, token_block 64, head_chunk_tokens 2048$", outcome.stdout, re.M)
        self.assertTrue(contract, outcome)
        one = self.plan(config, 1, *recipe, "parallel.tensor=1", "parallel.sequence=false", invariant,
                        "numerics.workers=16").stdout
        self.assertIn(contract[1], one)
        self.assertIn("(1 nodes)", one)
        proved = r"(?m)^while products and attention are proved, in the first step, up to (\d+) MiB more$"
        self.assertNotRegex(one, proved)
        on_gpus = self.plan(config, 12, "device=cuda", *recipe[1:], *layout, invariant, "numerics.workers=16").stdout
        # Half the gradient of the head's weights on a rank, in f32 (a part is at most 512 MiB), and what it is made of.
        head = 4 * 4096 * (3 * 151936 // 8) // 2 >> 20
        self.assertTrue(head < int(re.search(proved, on_gpus)[1]) < 2 * head, on_gpus)
        other = self.plan(config, 12, *recipe, *layout, invariant).stdout
        self.assertIn("workers 8,", other)
        self.assertNotIn(contract[1], other)

    def test_spares_of_sums(self):
        recipe = ["device=cpu", "train.sequence_length=1024", "train.micro_batch_size=8", "train.global_batch_size=8",
                  "numerics.precision=bf16", "parallel.tensor=1", "parallel.sequence=false"]
        invariant = ["numerics.reduction=invariant", "numerics.workers=8"]
        config = ROOT / "configs" / "gemma4_e2b.yaml"
        with_spares = self.memory_of_first_rank(config, 1, *recipe, *invariant)
        self.assertAlmostEqual(with_spares["gradients"], self.memory_of_first_rank(config, 1, *recipe)["gradients"]
                               + 4 * 262144 * 1536 / 2**20, delta=1)  # the second term of the vocabulary table
        # Three of the vocabulary table, which has products, not of the table of per-layer inputs, 8960 MiB.
        without = self.memory_of_first_rank(config, 1, *recipe, invariant[0], "numerics.workers=1")
        self.assertAlmostEqual(with_spares["scratch"] - without["scratch"], 3 * 4 * 262144 * 1536 / 2**20, delta=200)
        # Of three ranks of three workers the first keeps one sum, the others two; the last has three at once, so a spare.
        config = ROOT / "configs" / "qwen3_0.6b.yaml"
        shown = self.memory_of_first_rank(config, 3, *recipe[:2], "train.micro_batch_size=6", "train.global_batch_size=18",
                                          *recipe[4:], "parallel.data=3", invariant[0], "numerics.workers=9")
        self.assertGreater(shown["scratch"], 1400)  # 1086 without

    def test_nonuniform_replicas(self):
        config = ROOT / "configs" / "qwen3_0.6b.yaml"
        recipe = ["device=cpu", "train.micro_batch_size=1", "train.global_batch_size=16", "parallel.tensor=8", "parallel.data=2",
                  "parallel.spare=1"]
        failed = "parallel.nonuniform.failed=[dp0.tp5, dp1.tp0, dp1.tp0]"
        full = self.plan(config, 17, *recipe, failed).stdout
        self.assertRegex(full, r"(?m)^ranks +15 = tensor 8, 7 x data 2$")
        self.assertIn("2 of 17 ranks idle\n", full)
        rows = {int(row[0]): row[1:] for row in (line.split() for line in re.findall(r"^ +\d+  - .*$", full, re.M))}
        self.assertEqual(len(rows), 17)
        self.assertEqual(rows[5], ["-", "-", "dp0.tp5", "idle"])
        self.assertEqual(rows[16][:6], ["-", "-", "dp0.tp5", "train", "0", "5"])
        self.assertEqual(rows[8], ["-", "-", "dp1.tp0", "idle"])
        self.assertEqual(rows[9][:6], ["-", "-", "dp1.tp1", "train", "1", "0"])
        self.assertEqual(rows[9][7], "0-1")  # eight KV groups over seven ranks
        samples = {row[4]: int(row[6]) for row in rows.values() if row[3] == "train"}
        self.assertEqual(sum(samples.values()), 16)
        self.assertGreater(samples["0"], samples["1"])
        step_time, _, without = self.cost(full, "step time, modelled")
        self.assertTrue(1 < step_time < without == 2)
        self.assertEqual(self.cost(full, "samples a second")[2], 0.5)
        memory, whole, alone = self.cost(full, "memory of a rank")
        self.assertTrue(whole < memory < 1.5 * whole)
        self.assertTrue(whole < alone)  # one replica's ranks have its whole optimizer
        self.assertEqual(self.cost(full, "gradients, values sent")[2], 0)

        survivors = self.plan(config, 15, *recipe, failed).stdout
        self.assertNotIn("idle", survivors)
        self.assertIn("numerics contract", self.plan(config, 15, *recipe, failed, "numerics.reduction=invariant").stdout)
        shrunk = self.plan(config, 15, *recipe, failed, "parallel.nonuniform.batch=shrink").stdout
        self.assertIn("parallel.nonuniform.batch: shrink makes the global batch", shrunk)
        self.check_failure(self.plan(config, 16, *recipe, failed), USAGE, "17 ranks, 15 without the 2 failed ones")
        self.check_failure(self.plan(config, 17, *recipe, "parallel.nonuniform.failed=[node3.gpu0]"), USAGE,
                           "the host of node3.gpu0 is only known in a job")

    def cost(self, planned, name):
        """As planned, of the whole grid, of its whole replicas alone; None where there are none."""
        row = re.search(rf"^  {name} +(\S+) +(\S+) +(\S+)  (?:times|MiB, planned on rank \d+)$", planned, re.M)
        self.assertTrue(row, planned)
        return [None if value == "-" else float(value) for value in row.groups()]

    @staticmethod
    def sent(planned):
        """Launched rank -> MiB by group and operation."""
        tables = re.findall(r"^sent by rank (\d+):.*\n((?:  .*\n)*)", planned, re.M)
        return {int(rank): {name: float(mib) for name, mib in re.findall(r"^  (\S.*\S) +\d+ calls +([\d.]+) MiB$", rows, re.M)}
                for rank, rows in tables}

    def test_bytes_to_other_replicas_are_those_of_the_rank_that_sends_most(self):
        config = ROOT / "configs" / "qwen3_0.6b.yaml"
        grid = ["device=cpu", "train.micro_batch_size=1", "train.global_batch_size=16", "parallel.tensor=2", "parallel.data=2"]
        planned = self.plan(config, 4, *grid, "parallel.nonuniform.failed=[dp0.tp0]").stdout
        most, whole, alone = self.cost(planned, "gradients, values sent")
        self.assertRegex(planned, r"gradients, values sent .* MiB, planned on rank 1\n")  # alone in its replica; rank 0 idles
        sent = self.sent(planned)
        self.assertEqual(set(sent), {1, 2})
        self.assertEqual(most, sent[1]["gradients exchange"])
        self.assertGreater(sent[1]["gradients exchange"], sent[2]["gradients exchange"])
        self.assertGreater(sent[2]["gradients exchange"], 100)
        of_grid = self.sent(self.plan(config, 4, *grid).stdout)[0]
        self.assertAlmostEqual(whole, sum(mib for name, mib in of_grid.items() if name.startswith("data ")), delta=0.2)
        self.assertGreater(whole, 100)
        self.assertEqual(alone, 0)

    def test_the_units_of_every_kind_of_layer(self):
        for model, more, expected in (("gemma4_e4b", ["per-layer blocks"], {"per-layer blocks": "0-2"}),
                                      ("gemma4_12b", ["of full layers"], {"of full layers": "0-0"})):
            out = self.plan(ROOT / "configs" / f"{model}.yaml", 7, "device=cpu", "parallel.tensor=4", "parallel.data=2",
                            "parallel.nonuniform.failed=[dp1.tp0]").stdout
            header, row = re.search(r"^( rank  host .*)\n(?:.*\n){4}( +4  .*)$", out, re.M).groups()
            columns = {name: row[header.index(name):].split()[0] for name in [*more, "KV groups", "FFN blocks", "vocabulary units"]}
            self.assertEqual({name: columns[name] for name in more}, expected, out)
            self.assertRegex(columns["vocabulary units"], r"^0-\d+$")
            self.assertNotIn("of full layers" if "per-layer blocks" in more else "per-layer blocks", header)

    def test_a_plan_is_compared_with_leaving_damaged_replicas_out(self):
        config = ROOT / "configs" / "qwen3_0.6b.yaml"
        grid = ["device=cpu", "train.micro_batch_size=1", "train.global_batch_size=15", "parallel.tensor=3", "parallel.data=3"]
        failed = "parallel.nonuniform.failed=[dp1.tp0]"
        names = ("step time, modelled", "samples a second", "memory of a rank", "gradients, values sent")
        kept, left_out = (self.plan(config, 9, *grid, failed, *more).stdout for more in ([], ["parallel.nonuniform.min_tensor=3"]))
        self.assertIn("the whole grid, tensor 3 x data 3, and beside the whole replicas alone, data 2\n", kept)
        for name in names:  # 3 divides no heads: the grid is cut as the plan is, and 15 samples are 8 and 7
            costs = self.cost(kept, name)
            self.assertEqual(costs[2], self.cost(left_out, name)[0], name)
            self.assertEqual(costs[1:], self.cost(left_out, name)[1:], name)
            self.assertNotIn(costs[0], costs[1:], name)

        none = self.plan(config, 9, *grid, "parallel.nonuniform.failed=[dp0.tp0, dp1.tp1, dp2.tp2]").stdout
        self.assertIn("and beside none: no replica is whole\n", none)
        for name in names:
            self.assertEqual(self.cost(none, name)[2], None)
        wide = self.plan(config, 7, *grid[:3], "parallel.tensor=32", "parallel.nonuniform.tensor_widths=[4, 3]").stdout
        self.assertIn("the whole grid is no possible layout", wide)
        self.assertEqual(self.cost(wide, "memory of a rank")[1:], [None, None])

    def test_a_job_knows_its_hosts(self):
        config = self.config(parallel={"tensor": 2, "data": 2})
        host = socket.gethostname()
        out = self.succeed("plan", config, "--world", 4, f"parallel.nonuniform.failed=[{host}.gpu3]", ranks=4).stdout
        self.assertRegex(out, rf"(?m)^ +3  {re.escape(host)} +3  dp1.tp1 +idle$")
        self.assertIn("= tensor 2, 1 x data 2", out)
        refused = self.run_invar("plan", config, "--world", 4, "parallel.nonuniform.failed=[elsewhere.gpu3]", ranks=4)
        self.check_failure(refused, USAGE, "no rank was launched on elsewhere.gpu3")

    def test_contract_on_gpus_that_are_not_here(self):
        config = ROOT / "configs" / "qwen3_8b.yaml"
        arguments = ["device=cuda", "parallel.tensor=8", "parallel.data=8", "train.global_batch_size=64",
                     "numerics.reduction=invariant"]
        for precision in ("bf16", "fp32"):
            if "none is here" not in self.plan(config, 64, *arguments, f"numerics.precision={precision}").stdout:
                self.skipTest("there are GPUs")

    def test_a_batch_that_follows_the_ranks_has_its_workers(self):
        outcome = self.plan(ROOT / "configs" / "qwen3_0.6b.yaml", 8, "train.global_batch_size=auto",
                            "train.micro_batch_size=1", "numerics.reduction=invariant")
        self.assertIn("workers 8,", outcome.stdout)


if __name__ == "__main__":
    unittest.main()
