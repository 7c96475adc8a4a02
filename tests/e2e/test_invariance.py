"""numerics.reduction: invariant through mpirun and checkpoints: the layout of a run shows in no bit of it."""
import unittest

from invar_job import JobTest, read_lines

OUTSIDE, USAGE = 1, 2
STEPS, SEGMENT = 60, 10

# What a run goes through, ten steps each: overrides, ranks (None: without mpirun).
SEGMENTS = [
    ([], None),
    (["parallel.tensor=8", "parallel.sequence=true", "train.micro_batch_size=2"], 8),  # two ranks for each KV head
    (["parallel.data=4"], 4),
    (["parallel.tensor=2", "parallel.data=2", "train.micro_batch_size=4", "train.recompute=selective"], 4),
    (["parallel.tensor=3", "parallel.uneven=true", "train.recompute=full"], 3),
    (["train.micro_batch_size=8"], None),
]


class Invariance(JobTest):
    def recipe(self, **numerics):
        self.config(numerics=numerics, optimizer={"lr": 1e-2, "clip_grad": 0.5},
                    schedule={"kind": "cosine", "warmup_steps": 3, "min_lr": 1e-3},
                    train={"steps": STEPS, "global_batch_size": 8}, log={"hash_every": 1}, checkpoint={"every": SEGMENT})

    def hashes(self, run):
        """Step -> what is hashed of the state -> hash."""
        lines = read_lines(self.folder / run / "metrics.jsonl")
        self.assertEqual([line["step"] for line in lines], list(range(1, len(lines) + 1)))
        return {line["step"]: line["state_hash"] for line in lines}

    def check_a_run_that_changes_its_layout(self, precision):
        self.recipe(precision=precision, reduction="invariant", workers=8)
        self.train("still")
        for number, (overrides, ranks) in enumerate(SEGMENTS):
            stop = [] if number + 1 == len(SEGMENTS) else [f"train.exit_after_steps={SEGMENT}"]
            outcome = self.run_invar("train", "run.yaml", "log.dir=moving", *stop, *overrides, ranks=ranks)
            self.assertEqual(outcome.errors, [], outcome)
            self.assertEqual(len(self.hashes("moving")), SEGMENT * (number + 1), outcome)
        still = self.hashes("still")
        self.assertEqual(len({hashes["combined"] for hashes in still.values()}), STEPS)  # each step has its own
        self.assertEqual(self.hashes("moving"), still)
        outcome = self.succeed("compare", "moving", "still", "--exact")
        self.assertIn(f"state: {STEPS} steps with equal state", outcome.stdout)

    def test_fp32(self):
        self.check_a_run_that_changes_its_layout("fp32")

    def test_bf16(self):
        self.check_a_run_that_changes_its_layout("bf16")

    def test_other_leaves_are_other_bits(self):
        self.recipe(precision="fp32", reduction="invariant")
        few = ["train.steps=4", "checkpoint.every=2"]
        self.train("eight", *few)
        self.train("four", *few, "numerics.leaves=4")
        outcome = self.run_invar("compare", "four", "eight", "--exact")
        self.assertEqual(outcome.code, OUTSIDE, outcome)
        self.assertIn("state: equal at 0 of 4 hashed steps, first differing at step 1", outcome.stdout)
        for ranks in (None, 2):
            self.fail_with(USAGE, "leaves", "is 4, but the checkpoint was saved with 8", ranks=ranks,
                           arguments=["train", "run.yaml", "log.dir=eight", *few, "numerics.leaves=4"])

    def test_fast_sums_depend_on_the_layout(self):
        """The comparison notices what invariant numerics are there for."""
        self.recipe(precision="fp32", reduction="fast")
        self.train("alone", "train.steps=4")
        self.train("four", "train.steps=4", "parallel.tensor=4", ranks=4)
        outcome = self.run_invar("compare", "four", "alone", "--exact")
        self.assertEqual(outcome.code, OUTSIDE, outcome)
        self.assertIn("state: equal at 0 of 4 hashed steps", outcome.stdout)


if __name__ == "__main__":
    unittest.main()
