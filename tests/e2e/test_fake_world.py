"""invar train --fake-world: rank 0 of a larger job alone, to time and size it."""
import math
import re
import unittest

from invar_job import JobTest, read_lines, series

FAULT, USAGE = 1, 2


class FakeWorld(JobTest):
    LAYOUTS = {8: ["parallel.tensor=4", "parallel.sequence=true"], 4: ["parallel.tensor=2"],
               7: ["parallel.tensor=4", "parallel.nonuniform.tensor_widths=[4, 3]"]}

    def recipe(self):
        return self.config(model={"num_hidden_layers": 16, "initializer_range": 0.1}, checkpoint={"every": 0},
                           train={"steps": 4, "sequence_length": 32, "global_batch_size": 8})

    def test_a_rank_alone_trains_on_numbers_and_has_the_memory_of_the_plan(self):
        self.recipe()
        for world, layout in self.LAYOUTS.items():
            for reduction in ("fast", "invariant"):
                with self.subTest(world=world, reduction=reduction):
                    name = f"{reduction}_{world}"
                    keys = [*layout, f"numerics.reduction={reduction}"]
                    told = self.succeed("train", "run.yaml", "--fake-world", world, f"log.dir={name}", *keys)
                    self.assertIn(f"rank 0 of {world} alone", told.stderr + told.stdout)
                    lines = read_lines(self.folder / name / "metrics.jsonl")
                    self.assertEqual([line["step"] for line in lines], [1, 2, 3, 4])
                    for line in lines:
                        self.assertTrue(math.isfinite(line["loss"]) and 0 < line["grad_norm"] < 1e6, line)
                    planned = self.succeed("plan", "run.yaml", "--world", world, *keys).stdout
                    total = re.search(r"^ +0 +(?:[\d.]+ +){6}([\d.]+) ", planned, re.M)[1]
                    self.assertIn(f"memory of rank 0: {total} MiB", told.stdout)

    def test_tokens_are_those_that_the_rank_has_embeddings_of(self):
        """Rows of zeros in place of others make gradients of a deep model overflow."""
        self.recipe()
        alone = ("train", "run.yaml", "--fake-world", 4, *self.LAYOUTS[4])
        self.assertIn("mock tokens, uniform over [0, 128)", self.succeed(*alone).stdout)  # 8 of 16 units of 16 tokens
        uneven = ("--fake-world", 3, "parallel.tensor=3", "parallel.uneven=true", "numerics.reduction=invariant",
                  "numerics.leaves=7", "model.vocab_size=1120")
        told = self.succeed("train", "run.yaml", *uneven).stdout
        self.assertIn("mock tokens, uniform over [0, 352)", told)  # two leaves of seven: less than a third
        self.fail_with(USAGE, "data.kind: mock", arguments=(*alone, "data.kind=tokens", "data.path=x.bin"))
        self.fail_with(FAULT, "not finite", arguments=(*alone, "data.mock_vocab_size=250"))

    def test_one_fake_rank_is_a_run(self):
        self.recipe()
        self.succeed("train", "run.yaml", "--fake-world", 1, "log.dir=fake")
        self.succeed("train", "run.yaml", "log.dir=real")
        self.assertEqual(series(self.folder / "fake", "loss"), series(self.folder / "real", "loss"))

    def test_what_makes_no_sense_is_refused(self):
        self.recipe()
        wanted = ("train", "run.yaml", "--fake-world", 2, "parallel.tensor=2")
        for key in ("checkpoint.dir=saved", "checkpoint.export_dir=hf", "checkpoint.resume=somewhere"):
            self.fail_with(USAGE, "could be saved or resumed", "checkpoint.every: 0", arguments=(*wanted, key))
        for key in ("log.dump_step=1", "log.hash_every=1"):
            self.fail_with(USAGE, "nobody's to compare", arguments=(*wanted, "log.dir=state", key))
        self.fail_with(USAGE, "reshare: false", arguments=(*wanted, "parallel.nonuniform.reshare=true"))
        self.succeed(*wanted, "log.dir=once")
        self.fail_with(USAGE, "in place of once/metrics.jsonl, of another run", "another folder", arguments=(*wanted, "log.dir=once"))
        self.fail_with(USAGE, "under a launcher, with 2 ranks", "without mpirun", arguments=wanted, ranks=2)
        self.fail_with(USAGE, "3 ranks cannot be cut",
                       arguments=("train", "run.yaml", "--fake-world", 3, "parallel.tensor=2"))


if __name__ == "__main__":
    unittest.main()
