"""launch/slurm.sbatch with a Slurm that these tests make up: the announcement of the time limit, exit code 75, the queue."""
import os
import re
import shutil
import signal
import subprocess
import unittest

import invar_job
import test_checkpoints
from invar_job import ROOT, RUN_SECONDS, ranks_of, wait_until
from test_checkpoints import TENSOR, USAGE

RESTART = 75
RANKS = 2
JOB_ID = "4711"

SRUN = """#!/usr/bin/env bash
echo "$@" >> srun_arguments
while [[ $1 == --* ]]; do shift; done
exec {mpirun} "$@"
"""
SCONTROL = """#!/usr/bin/env bash
echo "$@" >> scontrol_arguments
"""
MPIRUN = """#!/usr/bin/env bash
exec {mpirun} "$@"
"""


class Slurm(test_checkpoints.CheckpointTest):
    def setUp(self):
        super().setUp()
        self.recipe(parallel=TENSOR)
        (self.folder / "bin").mkdir()
        real = [shutil.which(invar_job.MPIRUN), *invar_job.LAUNCH[1:]]
        for name, text in (("srun", SRUN.format(mpirun=" ".join([*real, "-n", str(RANKS)]))), ("scontrol", SCONTROL),
                           ("mpirun", MPIRUN.format(mpirun=" ".join(real)))):
            self.write(f"bin/{name}", text)
            (self.folder / "bin" / name).chmod(0o755)

    def submit(self, *arguments, pauses=(), **environment):
        """The batch shell, in a session of its own as under Slurm; its standard error goes to the same place."""
        variables = {**invar_job.environment_with(pauses), "INVAR": invar_job.INVAR,
                     "SLURM_SUBMIT_DIR": str(self.folder), "SLURM_JOB_ID": JOB_ID, "SLURM_NTASKS": str(RANKS),
                     "SLURM_CPUS_PER_TASK": "1", "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", **environment}
        process = subprocess.Popen([ROOT / "launch" / "slurm.sbatch", *arguments], cwd="/", env=variables, text=True,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.addCleanup(lambda: self.end_job(process))
        return process

    def launcher(self, shell):
        """The process that the batch shell waits for: mpirun, or what stands for it."""
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(shell.pid)], capture_output=True, text=True)
        return int(children.stdout.split()[0]) if children.stdout.split() else None

    def end_job(self, shell):
        if shell.poll() is None:
            launcher = self.launcher(shell)
            if launcher:
                os.kill(launcher, signal.SIGTERM)
            invar_job.end(shell)

    def finish_shell(self, shell):
        output, _ = shell.communicate(timeout=RUN_SECONDS)
        return shell.returncode, output

    def requeued(self):
        path = self.folder / "scontrol_arguments"
        return path.read_text().splitlines() if path.exists() else []

    def announced_and_requeued(self, launch):
        self.train("whole", ranks=RANKS)
        pause = self.pause_at_step(launch, 3)
        shell = self.submit("run.yaml", f"log.dir={launch}", pauses=[pause], INVAR_LAUNCH=launch)
        self.reach(pause, shell)
        ranks = ranks_of(self.launcher(shell))
        self.assertEqual(len(ranks), RANKS)
        self.announce(pause, lambda: shell.send_signal(signal.SIGUSR1))
        code, output = self.finish_shell(shell)
        self.assertEqual(code, RESTART, output)
        self.assertEqual(output.count("stopping after step 3: signal USR1"), 1, output)
        self.check_gone(ranks)
        self.assertEqual(self.requeued(), [f"requeue {JOB_ID}"])

        code, output = self.finish_shell(self.submit("run.yaml", f"log.dir={launch}", INVAR_LAUNCH=launch))
        self.assertEqual(code, 0, output)
        self.assertIn("resumed from", output)
        self.assertEqual(len(self.requeued()), 1)  # a run that is done stays done
        self.check_same_run(launch, "whole")

    def test_srun(self):
        self.announced_and_requeued("srun")
        options = (self.folder / "srun_arguments").read_text().splitlines()[0]
        self.assertRegex(options, rf"^--mpi=pmix .*{re.escape(invar_job.INVAR)} train run.yaml log.dir=srun$")

    def test_mpirun(self):
        self.announced_and_requeued("mpirun")

    def test_end_by_a_signal(self):
        """Requeued only if the end was announced: a crash must not come back for ever."""
        for announced in (False, True):
            with self.subTest(announced=announced):
                self.write("bin/srun", "#!/usr/bin/env bash\ntrap 'touch told' USR1\ntouch started\n"
                                       "until [[ -e die ]]; do sleep 0.02; done\nkill -KILL $$\n")
                for name in ("started", "told", "die"):
                    (self.folder / name).unlink(missing_ok=True)
                shell = self.submit("run.yaml")
                self.assertTrue(wait_until((self.folder / "started").exists, RUN_SECONDS))
                if announced:
                    shell.send_signal(signal.SIGUSR1)
                    self.assertTrue(wait_until((self.folder / "told").exists, RUN_SECONDS))
                self.write("die", "")
                code, output = self.finish_shell(shell)
                self.assertEqual(code, 128 + signal.SIGKILL, output)
                self.assertEqual(len(self.requeued()), int(announced))

    def test_failures_are_not_requeued(self):
        code, output = self.finish_shell(self.submit("run.yaml", "train.stepz=3"))
        self.assertEqual(code, USAGE, output)
        self.assertIn("did you mean train.steps?", output)
        code, output = self.finish_shell(self.submit())
        self.assertEqual(code, USAGE, output)
        self.assertIn("usage: sbatch launch/slurm.sbatch", output)
        code, output = self.finish_shell(self.submit("run.yaml", INVAR_LAUNCH="ssh"))
        self.assertEqual(code, USAGE, output)
        self.assertIn("INVAR_LAUNCH is srun or mpirun, not ssh", output)
        self.assertEqual(self.requeued(), [])


if __name__ == "__main__":
    unittest.main()
