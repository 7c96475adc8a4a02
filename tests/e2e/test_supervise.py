"""launch/supervise: ranks that die at any step cost a restart, and not one bit of the run; errors are not restarted."""
import json
import math
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock

import invar_job
from invar_job import LAUNCH, ROOT, RUN_SECONDS, JobTest, last_by_step, wait_until

sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "launch"))
from supervision import job, rank, verdict  # noqa: E402
from supervision.layout import Layout  # noqa: E402

USAGE, DATA, FAULT, RESTART = 2, 3, 1, 75
SUPERVISE = ROOT / "launch" / "supervise"
SEED = 20


class SuperviseTest(JobTest):
    def recipe(self, tensor, data, spare=0, steps=16):
        """A step of eight samples, of which the replicas take equal parts one after another."""
        self.config(numerics={"reduction": "invariant"}, optimizer={"lr": 1e-2},
                    train={"steps": steps, "global_batch_size": 8}, checkpoint={"every": 5},
                    log={"hash_every": 1}, parallel={"tensor": tensor, "data": data, "spare": spare})

    def supervise(self, *options, run="run", program=invar_job.INVAR, overrides=(), launch=LAUNCH, pauses=()):
        environment = {**invar_job.environment_with(pauses), "MPIRUN": " ".join(launch), "INVAR_LAUNCH": "mpirun"}
        # parallel.tensor and data are in run.yaml too, but this Python may have no yaml module.
        layout = re.findall(r"^  (tensor|data|spare): (\d+)$", (self.folder / "run.yaml").read_text(), re.M)
        process = subprocess.Popen([sys.executable, "-B", SUPERVISE, *options, "--", program, "train", "run.yaml",
                                    f"log.dir={run}", *[f"parallel.{key}={value}" for key, value in layout],
                                    "checkpoint.every=5", *overrides],
                                   cwd=self.folder, env=environment, text=True, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(lambda: invar_job.end(process) if process.poll() is None else None)
        self.addCleanup(self.check_nothing_is_left, run)
        return process

    def finish_supervise(self, process, code=0):
        outcome = self.finish(process, time.monotonic(), 3 * RUN_SECONDS)
        self.assertEqual(outcome.code, code, outcome)
        self.assertNotIn("Traceback", outcome.stderr, outcome)
        return outcome

    def records(self, attempt, run="run"):
        return [json.loads(path.read_text())
                for path in (self.folder / run / "supervise" / f"attempt_{attempt}").glob("rank_*.json")]

    def check_nothing_is_left(self, run):
        records = [json.loads(path.read_text()) for path in (self.folder / run).glob("supervise/*/rank_*.json")]
        pids = [record[key] for record in records for key in ("pid", "wrapper") if key in record]
        self.check_gone(pids)

    def signal_rank(self, process, pause, rank, number=signal.SIGKILL, attempt=1, run="run"):
        """While the run stands still in this attempt; then it goes on."""
        def pids():
            return [record["pid"] for record in self.records(attempt, run)
                    if record["rank"] == rank and "pid" in record]
        self.reach(pause, process)
        self.assertTrue(wait_until(pids, RUN_SECONDS), "the wrapper has not written down what it started")
        os.kill(*pids(), number)
        pause.release()

    def supervise_and_signal(self, rank, step, *options, number=signal.SIGKILL, run="run", overrides=()):
        """Starts a run of which this rank gets the signal at this step."""
        pause = self.pause_at_step(run, step)
        process = self.supervise(*options, run=run, overrides=overrides, pauses=[pause])
        self.signal_rank(process, pause, rank, number, run=run)
        return process

    def check_same_bits(self, run, reference):
        for key in ("state_hash", "loss"):
            self.assertEqual(last_by_step(self.folder / run, key), last_by_step(self.folder / reference, key), key)


class Deaths(SuperviseTest):
    def test_any_rank_at_any_step(self):
        self.recipe(tensor=4, data=2, steps=24)
        self.train("whole", "parallel.tensor=1", "parallel.data=1")
        rng = random.Random(SEED)
        for rank in (0, rng.randrange(1, 8)):
            with self.subTest(rank=rank):
                run, step = f"killed_{rank}", rng.randrange(3, 22)
                outcome = self.finish_supervise(self.supervise_and_signal(rank, step, run=run))
                slot = f"dp{rank // 4}.tp{rank % 4}"
                widths = "[3, 4]" if rank < 4 else "[4, 3]"
                self.assertIn(f"dead: {slot} (rank {rank}, host ", outcome.stdout)
                self.assertIn("killed by SIGKILL", outcome.stdout)
                self.assertEqual(outcome.stdout.count("supervise: dead:"), 1, outcome)
                self.assertIn(f"attempt 2: 7 ranks, tensor widths {widths}\n", outcome.stdout)
                self.assertRegex(outcome.stdout, rf"{slot}: first new step [\d.]+ s after it: step \d+")
                self.assertEqual(len(last_by_step(self.folder / run, "state_hash")), 24)
                self.check_same_bits(run, "whole")
                print(next(line for line in outcome.stdout.splitlines() if "first new step" in line))

    def test_a_spare_steps_in_and_dies(self):
        self.recipe(tensor=2, data=1, spare=1)
        self.train("whole", "parallel.tensor=1", "parallel.spare=0")
        pauses = [self.pause_at_step("run", 3), self.pause_at_step("run", 9)]
        process = self.supervise(pauses=pauses)
        self.signal_rank(process, pauses[0], 1)
        self.signal_rank(process, pauses[1], 1, attempt=2)
        outcome = self.finish_supervise(process)
        self.assertIn("attempt 1: 3 ranks, tensor widths [2], 1 idle\n", outcome.stdout)
        self.assertIn("dead: dp0.tp1 (rank 1, ", outcome.stdout)
        self.assertIn("attempt 2: 2 ranks, tensor widths [2]\n", outcome.stdout)
        self.assertIn("dead: spare 0 in the place of dp0.tp1 (rank 1, ", outcome.stdout)
        self.assertIn("attempt 3: 1 ranks, tensor widths [1]\n", outcome.stdout)
        self.check_same_bits("run", "whole")

    def test_two_deaths(self):
        """The second in the shrunken job, whose rank 2 was rank 3 of the whole one; then the restarts are used up."""
        self.recipe(tensor=2, data=2)
        self.train("whole", "parallel.tensor=1", "parallel.data=1")
        pauses = [self.pause_at_step("run", 3), self.pause_at_step("run", 9)]
        process = self.supervise("--max-restarts", "2", pauses=pauses)
        self.signal_rank(process, pauses[0], 1)
        self.signal_rank(process, pauses[1], 2, attempt=2)
        outcome = self.finish_supervise(process)
        self.assertIn("dead: dp0.tp1 (rank 1, ", outcome.stdout)
        self.assertIn("dead: dp1.tp1 (rank 2, ", outcome.stdout)
        self.assertIn("attempt 3: 2 ranks, tensor widths [1, 1]\n", outcome.stdout)
        self.assertIn("supervise: 2 interruptions; ", outcome.stdout)
        self.check_same_bits("run", "whole")

    def test_a_stopped_rank(self):
        """The limit, for lines of the start too, is many times what a whole run takes here and now."""
        self.recipe(tensor=2, data=2)
        since = time.monotonic()
        self.train("whole", ranks=4)
        limit = math.ceil(5 + 5 * (time.monotonic() - since))
        outcome = self.finish_supervise(self.supervise_and_signal(2, 7, "--hang", str(limit), number=signal.SIGSTOP))
        self.assertIn(f"no new line in run/metrics.jsonl for {limit} s", outcome.stdout)
        self.assertIn("dead: dp1.tp0 (rank 2, ", outcome.stdout)
        self.assertIn(": stopped at ", outcome.stdout)
        self.assertIn("attempt 2: 3 ranks, tensor widths [2, 1]\n", outcome.stdout)
        self.check_same_bits("run", "whole")

    def test_too_few_survivors(self):
        self.recipe(tensor=2, data=1)
        process = self.supervise_and_signal(0, 2, overrides=["parallel.nonuniform.min_tensor=2"])
        outcome = self.finish_supervise(process, FAULT)
        self.assertIn("too few survivors: no replica has 2 of 2 ranks left", outcome.stdout)


class Ends(SuperviseTest):
    def test_config_error(self):
        self.recipe(tensor=2, data=1)
        outcome = self.finish_supervise(self.supervise(overrides=["train.stepz=3"]), USAGE)
        self.check_failure(outcome, USAGE, "unknown key train.stepz", "did you mean train.steps?")
        self.assertIn("not restarted: exit code 2 is of a config error", outcome.stdout)
        self.assertNotIn("attempt 2", outcome.stdout)

    def test_data_file_that_shrinks(self):
        """Under a live run: the file's fault, whose message stays the last word; no machine is given up."""
        self.recipe(tensor=2, data=1)
        invar_job.write_tokens(self.folder / "d.bin", [i % invar_job.VOCABULARY for i in range(4096)])
        process = self.supervise(overrides=["train.steps=1000000", "data.kind=tokens", "data.path=d.bin",
                                            "data.token_dtype=uint16"])
        self.assertTrue(wait_until(lambda: last_by_step(self.folder / "run", "loss"), RUN_SECONDS), "never began")
        os.truncate(self.folder / "d.bin", 1000)
        outcome = self.finish_supervise(process, DATA)
        self.check_failure(outcome, DATA, "d.bin: the file has shrunk: 8192 bytes when it was opened, 1000 now")
        self.assertIn("not restarted: exit code 3 is of a data error", outcome.stdout)
        self.assertNotIn("dead:", outcome.stdout)

    def test_max_restarts(self):
        self.recipe(tensor=2, data=1)
        outcome = self.finish_supervise(self.supervise_and_signal(1, 2, "--max-restarts", "0"), FAULT)
        self.assertIn("dead: dp0.tp1", outcome.stdout)
        self.assertIn("giving up: --max-restarts 0", outcome.stdout)
        self.assertNotIn("attempt 2", outcome.stdout)

    def test_sigterm(self):
        """Saves before it ends, also with an idle spare; the same command goes on to the end."""
        self.recipe(tensor=2, data=1, spare=1)
        pause = self.pause_at_step("run", 3)
        process = self.supervise(pauses=[pause])
        self.reach(pause, process)
        process.terminate()
        self.announce(pause, lambda: None)  # supervise repeats it
        outcome = self.finish_supervise(process, RESTART)
        self.assertIn("stopping after step 3: signal USR1", outcome.stdout)
        self.assertEqual((self.folder / "run/checkpoints/latest").read_text().strip(), "step_00000003")
        self.assertNotIn("dead", outcome.stdout)

    def test_killed_supervisor(self):
        """Leaves no rank behind either; the cleanup looks for them."""
        self.recipe(tensor=2, data=1)
        pause = self.pause_at_step("run", 2)  # for ever: the ranks do not end by themselves
        process = self.supervise(pauses=[pause])
        self.reach(pause, process)
        self.assertTrue(wait_until(lambda: all("pid" in record for record in self.records(1)), RUN_SECONDS))
        process.kill()
        process.communicate(timeout=RUN_SECONDS)
        self.check_gone([record["pid"] for record in self.records(1)])

    def crashing(self, text):
        self.recipe(tensor=2, data=2)
        path = self.folder / "crashing"
        path.write_text(f"#!/bin/sh\necho \"$@\" >> arguments\n{text}\n")
        path.chmod(0o755)
        return str(path)

    def test_crash_without_a_dead_rank(self):
        outcome = self.finish_supervise(self.supervise(program=self.crashing("exit 1")), FAULT)
        self.assertEqual(outcome.stdout.count("no rank is known to be dead"), 2, outcome)
        self.assertIn("attempt 2: 4 ranks, tensor widths [2, 2]\n", outcome.stdout)
        self.assertIn("giving up: two attempts in a row ended after step 0 without a dead rank", outcome.stdout)
        self.assertNotIn("dead:", outcome.stdout)
        self.assertNotIn("attempt 3", outcome.stdout)

    def test_folder_that_hosts_do_not_share(self):
        self.recipe(tensor=2, data=1)
        self.write("launch", '#!/bin/sh\nrm run/supervise/*/plan.json\nexec "$@"\n')
        os.chmod(self.folder / "launch", 0o755)
        outcome = self.finish_supervise(self.supervise(launch=["./launch", *LAUNCH]), USAGE)
        self.assertRegex(outcome.stdout, rf"not restarted: host \S+ does not see .*: log.dir \({self.folder}/run\)")
        self.assertNotIn("attempt 2", outcome.stdout)

    def test_health_check(self):
        program = self.crashing('case "$*" in *failed*) exit 0;; esac; exit 1')
        self.write("check", "#!/bin/sh\n[ $1 != 3 ] || { echo sick; exit 1; }\n")
        os.chmod(self.folder / "check", 0o755)
        outcome = self.finish_supervise(self.supervise("--health", "./check", program=program))
        self.assertRegex(outcome.stdout, r"dead: dp1.tp1 \(rank 3, host \S+ GPU 3\): health check: sick")
        self.assertIn("attempt 2: 3 ranks, tensor widths [2, 1]\n", outcome.stdout)
        arguments = (self.folder / "arguments").read_text()
        self.assertIn("parallel.nonuniform.failed=[dp1.tp1]", arguments)

    def test_refuses(self):
        self.recipe(tensor=2, data=2)
        for overrides, expected in ((["parallel.nonuniform.failed=[node1.gpu2]"], "node1.gpu2 is no slot of the grid"),
                                    (["parallel.nonuniform.failed=[dp2.tp0]"], "dp0.tp0 to dp1.tp1"),
                                    (["parallel.nonuniform.tp_base=2", "parallel.nonuniform.tp_spares=1",
                                      "parallel.nonuniform.num_reduced_tp_dp_ranks=2"],
                                     "nonuniform.tp_base, parallel.nonuniform.tp_spares, "
                                     "parallel.nonuniform.num_reduced_tp_dp_ranks: failures are named by")):
            outcome = self.finish_supervise(self.supervise(overrides=overrides), USAGE)
            self.assertIn(expected, outcome.stderr)
        outcome = self.finish_supervise(self.supervise(program="./absent"), USAGE)
        self.assertIn("./absent is not there", outcome.stderr)


class Rules(unittest.TestCase):
    """What needs hosts and GPUs that tests do not have."""

    @staticmethod
    def record(rank, host="a", **fields):
        return {"rank": rank, "host": host, "gpu": str(rank), **fields}

    def dead(self, records, ranks=4, training=None, text="", hung=False):
        deaths = verdict.find_deaths({record["rank"]: record for record in records}, ranks,
                                     set(range(ranks)) if training is None else training, text, hung)
        return [death.rank for death in deaths]

    def test_deaths(self):
        told = [self.record(rank, told=5.0, signal=9, end=6.0) for rank in range(4)]
        killed = self.record(2, signal=9, end=4.0)
        left = self.record(1, code=1, end=4.5)
        self.assertEqual(self.dead([told[0], told[1], killed, told[3]]), [2])
        self.assertEqual(self.dead([told[0], left, killed, told[3]]), [2])
        self.assertEqual(self.dead([told[0], left, told[2], told[3]]), [])
        self.assertEqual(self.dead([told[0], self.record(1, signal=6, end=4.0), *told[2:]]), [])  # abort()
        self.assertEqual(self.dead([*told[:3], self.record(3)]), [3])
        late = [self.record(2, "b"), self.record(3, "b")]
        self.assertEqual(self.dead([told[0], left, *late]), [])
        self.assertEqual(self.dead([told[0], left, self.record(2), *late[1:]]), [2])
        self.assertEqual(self.dead([*told[:2], *late]), [2, 3])
        self.assertEqual(self.dead(told[:3]), [])  # never began
        self.assertEqual(self.dead([]), [])
        lost = "Remote daemon: [[1,0],2] on node b\n"
        self.assertEqual(self.dead([*told[:2], self.record(2, "b"), self.record(3, "b")], text=lost), [2, 3])
        self.assertEqual(self.dead([*told[:2], self.record(2), told[3]],
                                   text="mpirun noticed that process rank 2 with PID 0 on node a exited on signal 9"),
                         [2])

    def test_data_errors_are_no_deaths(self):
        """Exit code 3 is of a file. What becomes of the other ranks while the job ends is its consequence."""
        refused = self.record(1, code=3, end=4.5)
        killed = [self.record(0, signal=9, end=4.6), self.record(2, signal=7, end=5.0)]
        self.assertEqual(self.dead([killed[0], refused, killed[1], self.record(3)]), [])
        told = [self.record(rank, told=5.0, signal=9, end=6.0) for rank in (0, 2)]
        device = "invar: error: rank 3: step 2: CUDA: unknown error"
        self.assertEqual(self.dead([told[0], refused, told[1], self.record(3)], text=device), [])
        self.assertEqual(self.dead([told[0], refused, self.record(2, signal=7, end=4.0)]), [2])  # before it
        lost = "Remote daemon: [[1,0],2] on node b\n"
        self.assertEqual(self.dead([told[0], refused, self.record(2, "b")], text=lost), [2])

    def test_what_ranks_say(self):
        told = [self.record(rank, told=5.0) for rank in range(4)]
        waits = "rank {}: all_reduce 7 in group 'tensor' (rank 0 of 2), 64 bytes: not done 9.0 s after it was queued, 0"
        self.assertEqual(self.dead(told, text="\n".join(waits.format(rank) for rank in (0, 1, 3))), [2])
        self.assertEqual(self.dead(told, text="\n".join(waits.format(rank) for rank in range(4))), [])
        self.assertEqual(self.dead(told, text="\n".join(waits.format(rank) for rank in (0, 1)), training={0, 1}), [])
        # tensor 4, data 2: rank 2 hangs; 6 and 7 queued their sums later, and the job ended before they reported.
        told = [self.record(rank, told=5.0) for rank in range(8)]
        self.assertEqual(self.dead(told, 8, text="\n".join(waits.format(rank) for rank in (0, 1, 3, 4, 5))), [])
        device = "invar: error: rank 1: cudaEventQuery: uncorrectable ECC error encountered [lib/device]"
        self.assertEqual(self.dead(told, text=device), [1])
        peer = "rank 1: x: NCCL: remote process exited or there was a network error"
        self.assertEqual(self.dead(told, text=peer), [])

    def test_hangs(self):
        answers = [self.record(rank, answer=answer) for rank, answer in enumerate("RTRD")]
        self.assertEqual(self.dead(answers, hung=True), [1, 3])
        self.assertEqual(self.dead([answers[0], answers[2]], ranks=3, hung=True), [1])
        self.assertEqual(self.dead([self.record(rank) for rank in range(4)], hung=True), [])

    def test_slots(self):
        layout = Layout(tensor=3, data=2, spare=2)
        self.assertEqual((layout.slots(), layout.idle()), (list(range(8)), [6, 7]))
        layout = layout.without([4])
        self.assertEqual((layout.slots(), layout.idle()), ([0, 1, 2, 3, 5, 6, 7], [6]))
        layout = layout.without([6, 0])  # the spare in the place of dp1.tp1, and another rank: one spare is left
        self.assertEqual(layout.arguments(["a.b=1", "parallel.spare=2"]),
                         ["a.b=1", "parallel.spare=1", "parallel.nonuniform.failed=[dp0.tp0,dp1.tp1]"])
        self.assertEqual((layout.widths(), layout.slots(), layout.idle()), ([3, 2], [1, 2, 3, 5, 6], []))
        self.assertEqual(layout.name(6), "spare 0 in the place of dp0.tp0")
        narrow = Layout(tensor=3, data=2, min_tensor=3, failed=frozenset([1]))
        self.assertEqual((narrow.training_widths(), narrow.idle()), ([3], [0, 1]))

    def test_hosts(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            hosts = ["a", "b", "b"]
            words, variables = job.on_hosts("mpirun", ["mpirun", "--hostfile", "old", "-x", "A"], hosts, folder)
            self.assertEqual((words, variables), (["mpirun", "-x", "A", "--hostfile", f"{name}/hosts"], {}))
            self.assertEqual((folder / "hosts").read_text(), "a slots=1\nb slots=2\n")
            for order, hosts in ([], ["a", "b", "a"]), (["--map-by", "node"], ["a", "a", "b"]):  # interleaved
                words, _ = job.on_hosts("mpirun", ["mpirun", *order, "-x", "A"], hosts, folder)
                self.assertEqual(words, ["mpirun", "-x", "A", "--map-by", "seq", "--hostfile", f"{name}/hosts"])
                self.assertEqual((folder / "hosts").read_text().split(), hosts)
            hosts = ["a", "b", "b"]
            words, variables = job.on_hosts("srun", ["srun"], hosts, folder)
            self.assertEqual((words, variables), (["srun", "--distribution=arbitrary"],
                                                  {"SLURM_HOSTFILE": f"{name}/hosts"}))
            self.assertEqual((folder / "hosts").read_text(), "a\nb\nb\n")

    def test_gpus(self):
        """Each rank has one of its own; more ranks than GPUs take them in turn."""
        def names(shown, of_driver):
            one = rank.Rank.__new__(rank.Rank)
            one.environment = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
            with unittest.mock.patch.object(rank, "gpus_of_driver", lambda: of_driver):
                found = []
                for one.local_rank in range(4):
                    found.append(one.gpu())
                return found
        self.assertEqual(names(None, 4), ["0", "1", "2", "3"])
        self.assertEqual(names(None, 1), ["0", "0", "0", "0"])
        self.assertEqual(names("7,GPU-a", 8), ["7", "GPU-a", "7", "GPU-a"])
        self.assertEqual(names(None, 0), ["0", "1", "2", "3"])  # the driver does not tell


if __name__ == "__main__":
    unittest.main()
