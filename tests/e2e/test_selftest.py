"""invar selftest: what it checks and says on the CPU, and what it refuses."""
import re
import unittest

from invar_job import RUN_SECONDS, JobTest

USAGE = 2
STEPS = 2
NUMERICS = ("fp32", "bf16", "bf16, rounded leaves")


class Selftest(JobTest):
    def test_invariant_numerics_hold_here(self):
        outcome = self.run_invar("selftest", "device=cpu", "--steps", STEPS, seconds=4 * RUN_SECONDS)
        self.assertEqual(outcome.code, 0, outcome)
        lines = [re.fullmatch(r"(.{90}) (\S.*)", line) for line in outcome.stdout.splitlines()]  # aligned
        self.assertTrue(all(lines), outcome)
        told = {match[1].rstrip(): match[2] for match in lines}
        self.assertEqual(len(told), len(lines), outcome)
        self.assertRegex(told["device"], r"^CPU, threads: \d+$")
        checks = [name for name, text in told.items() if text == "ok"]
        self.assertEqual(told[f"{len(checks)} checks"], "0 FAILED", outcome)
        for dtype in ("f32", "bf16"):
            self.assertIn(f"products of {dtype} are chains of fused multiply-adds", checks)
            self.assertIn(f"products of {dtype}, control: K in two differs", checks)
            self.assertEqual(len([name for name in checks if name.startswith(f"attention tiled {dtype} ")]), 6)
        for model in ("Qwen3", "Gemma 4"):
            for precision in NUMERICS:
                own = [name for name in checks if name.startswith(f"{model} {precision}: ")]
                self.assertEqual(len(own), 9, own)
                self.assertTrue(any("tensor 4 sequence" in name for name in own), own)
                self.assertTrue(any("tensor 8 sequence" in name for name in own), own)
                self.assertTrue(any("control" in name for name in own), own)
        self.assertEqual(len([name for name in checks if name.endswith(" over 2^20 inputs")]), 6)
        contracts = [told[f"numerics contract, {precision}"] for precision in NUMERICS]
        for contract in contracts:
            self.assertRegex(contract, r"^[0-9a-f]{16}: version 2, .*arithmetic fma-chain, leaves 8")
        self.assertEqual(len({contract[:16] for contract in contracts}), len(NUMERICS))
        self.assertTrue(contracts[2].endswith("tensor_reduce_dtype bf16"), contracts[2])
        states = [told["states of all models, layouts and steps"], told["the same with rounded leaves"]]
        for state in states:
            self.assertRegex(state, r"^[0-9a-f]{16}$")
        self.assertNotEqual(*states)

    def test_refusals(self):
        self.fail_with(USAGE, "train.steps=3", arguments=["selftest", "train.steps=3"])
        self.fail_with(USAGE, "device", arguments=["selftest", "device=tpu"])
        self.fail_with(USAGE, "device = cuda, but this", arguments=["selftest", "device=cuda"])  # build or process
        self.fail_with(USAGE, "one process", arguments=["selftest", "device=cpu"], ranks=2)


if __name__ == "__main__":
    unittest.main()
