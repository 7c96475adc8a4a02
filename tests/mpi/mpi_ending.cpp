// One way for a job to end. Rank 1 does what the arguments say while the others wait for it in a collective:
//   return CODE   all ranks return it     abort CODE    rank 1 ends the job
//   kill          rank 1 is killed        throw         an exception leaves rank 1's main function
//   stop          rank 1 is stopped, with a timeout of a second
//   late          rank 1 comes after that timeout, as soon as another rank asks who waits
//   idle          the same stop, where rank 0 is idle and the others meet at the end
//   stale         rank 1 answers the others' first questions when they ask again, and stops
#include <chrono>
#include <csignal>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "comm/mpi_communicator.h"
#include "comm/mpi_waiting.h"

namespace invar {
namespace {

void wait_for_question() {
  for (int asked = 0; asked == 0; std::this_thread::yield()) {
    MPI_Iprobe(MPI_ANY_SOURCE, kAskTag, MPI_COMM_WORLD, &asked, MPI_STATUS_IGNORE);
  }
}

// The questions of two ranks.
std::vector<std::pair<int, std::string>> take_questions() {
  std::vector<std::pair<int, std::string>> questions;
  while (questions.size() < 2) {
    wait_for_question();
    MPI_Status from{};
    std::string text(100, '\0');
    MPI_Recv(text.data(), static_cast<int>(text.size()), MPI_BYTE, MPI_ANY_SOURCE, kAskTag, MPI_COMM_WORLD, &from);
    int bytes = 0;
    MPI_Get_count(&from, MPI_BYTE, &bytes);
    questions.emplace_back(from.MPI_SOURCE, text.substr(0, static_cast<size_t>(bytes)));
  }
  return questions;
}

void answer_too_late(Communicator& world) {
  const auto first = take_questions();
  world.barrier();
  take_questions();
  for (const auto& [rank, question] : first) {
    const std::string text = question + " barrier";
    MPI_Ssend(text.data(), static_cast<int>(text.size()), MPI_BYTE, rank, kAnswerTag, MPI_COMM_WORLD);
  }
  std::raise(SIGSTOP);
}

int run(int argc, char** argv) {
  MpiSession session(&argc, &argv);
  Communicator& world = session.world();
  const std::string way = argc > 1 ? argv[1] : "";
  const int code = argc > 2 ? std::stoi(argv[2]) : 0;
  if (world.rank() == 0) std::cout << format("world of {}\n", world.size()) << std::flush;
  world.barrier();
  if (way == "stop" || way == "late" || way == "idle" || way == "stale") session.set_timeout(std::chrono::seconds(1));
  if (way == "return") return code;
  if (way == "idle") {
    if (world.rank() == 1) std::raise(SIGSTOP);
    session.meet_at_the_end(world.rank() == 0);
    return 0;
  }
  if (way == "stale") {
    if (world.rank() == 1) answer_too_late(world);
    world.barrier();
    world.barrier();
    return 0;
  }
  if (way == "late" && world.rank() == 1) {
    wait_for_question();
  } else if (world.rank() == (world.size() > 1 ? 1 : 0)) {
    const auto group = world.split(0, 0, "group");  // alive while the exception unwinds
    if (way == "abort") {
      std::cout << format("last words of rank {}", world.rank());  // abort() has to flush them
      session.abort(code);
    }
    if (way == "kill") std::raise(SIGKILL);
    if (way == "stop") std::raise(SIGSTOP);
    throw Error(ErrorKind::kData, format("rank {} threw", world.rank()));
  }
  world.split(0, 0, "group");
  return static_cast<int>(all_reduce_value(world, int64_t{0}, ReduceOp::kSum));
}

}  // namespace
}  // namespace invar

int main(int argc, char** argv) {
  try {
    return invar::run(argc, argv);
  } catch (const invar::Error& error) {
    std::cerr << error.what() << '\n';
    return static_cast<int>(error.kind());
  }
}
