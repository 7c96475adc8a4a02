"""A rank that stands still ends the job on CPUs too: comm.timeout names the call and the rank, and nobody waits for ever."""
import os
import signal
import sys
import unittest

import invar_job
from invar_job import FAILURE_SECONDS, ROOT, RUN_SECONDS, JobTest, series

sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "launch"))
from supervision import verdict  # noqa: E402

FAULT = 1
TIMEOUT = 2  # seconds a collective may take in these runs, whose steps take some milliseconds


class Stopped(JobTest):
    def stop_one(self, layout, ranks, victim):
        timeout = TIMEOUT * invar_job.SLOWER
        config = self.config(parallel=layout, train={"steps": 10**9}, log={"dir": "run", "every": 1},
                             comm={"timeout": timeout})
        process = self.start("train", config, ranks=ranks)
        self.assertTrue(invar_job.wait_until(lambda: series(self.folder / "run", "step"), RUN_SECONDS), "no step")
        pids = invar_job.ranks_of(process.pid)
        self.assertEqual(len(pids), ranks)
        os.kill(pids[victim], signal.SIGSTOP)
        outcome = self.finish(process, 0, timeout + FAILURE_SECONDS)
        self.check_failure(outcome, FAULT, "step ", "in group '", "s after it began: no answer from rank ",
                           "comm.timeout")
        self.assertRegex(outcome.errors[0], rf"rank \d+: step \d+: .*no answer from rank {victim} \[")
        self.check_gone(pids)
        return outcome

    def test_an_idle_rank_that_stands_still_is_named_at_the_end(self):
        """One that a plan leaves out sleeps through the training, longer than the others wait for each other."""
        timeout = TIMEOUT * invar_job.SLOWER
        config = self.config(parallel={"tensor": 2, "data": 2}, log={"dir": "run"}, comm={"timeout": timeout})
        pause = self.pause_at_step("run", 1)
        process = self.start("train", config, "parallel.nonuniform.failed=[dp0.tp1]", ranks=4, pauses=[pause])
        self.reach(pause, process)
        pids = invar_job.ranks_of(process.pid)
        os.kill(pids[1], signal.SIGSTOP)
        pause.release()
        outcome = self.finish(process, 0, timeout + FAILURE_SECONDS)
        self.check_failure(outcome, FAULT, "barrier at the end in group 'world'", "no answer from rank 1 [",
                           "comm.timeout")
        self.check_gone(pids)

    def test_of_two(self):
        self.stop_one({"tensor": 2, "sequence": "true"}, 2, victim=1)

    def test_of_a_grid_whose_other_ranks_wait_for_each_other(self):
        """Of four ranks three wait, in groups that need not have the stopped one: it alone is named."""
        outcome = self.stop_one({"tensor": 2, "data": 2}, 4, victim=3)
        self.assertEqual([death.rank for death in verdict.awaited(outcome.stderr, {0, 1, 2, 3})], [3])


class Verdict(unittest.TestCase):
    SAID = ("invar: error: rank 0: step 7: all_reduce in group 'data' (rank 0 of 2): not done 5.0 s after it began: "
            "no answer from {} [lib/comm/checks.cpp:60]\n")

    def test_one_rank_without_an_answer_is_dead(self):
        deaths = verdict.awaited(self.SAID.format("rank 2"), {0, 1, 2, 3})
        self.assertEqual([(death.rank, death.reason) for death in deaths], [(2, "the others wait for it")])

    def test_of_several_nobody_is(self):
        self.assertEqual(verdict.awaited(self.SAID.format("ranks 1, 2 and 3"), {0, 1, 2, 3}), [])

    def test_a_rank_that_waits_for_its_gpu_cannot_answer_but_reports(self):
        said = self.SAID.format("ranks 2 and 3") + "rank 3: all_reduce 7 in group 'tensor': not done 5.2 s after it was queued"
        self.assertEqual([death.rank for death in verdict.awaited(said, {0, 1, 2, 3})], [2])


if __name__ == "__main__":
    unittest.main()
