#include "comm/mpi_waiting.h"

#include <algorithm>
#include <thread>
#include <vector>

namespace invar {
namespace {

bool probe(int tag, MPI_Status& status) {
  int found = 0;
  return MPI_Iprobe(MPI_ANY_SOURCE, tag, MPI_COMM_WORLD, &found, &status) == MPI_SUCCESS && found != 0;
}

// Nobody waits for it: who does not take it is to be found out.
void send_text(const std::string& text, int rank, int tag) {
  MPI_Request never_awaited = MPI_REQUEST_NULL;
  MPI_Isend(text.data(), static_cast<int>(text.size()), MPI_BYTE, rank, tag, MPI_COMM_WORLD, &never_awaited);
}

std::string receive_text(const MPI_Status& from) {
  int bytes = 0;
  MPI_Get_count(&from, MPI_BYTE, &bytes);
  std::string text(static_cast<size_t>(bytes), '\0');
  MPI_Recv(text.data(), bytes, MPI_BYTE, from.MPI_SOURCE, from.MPI_TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  return text;
}

}  // namespace

std::string MpiWaiting::call_of(const Communicator& group, std::string_view operation) {
  return format("{} in group '{}'", operation, group.name());
}

int MpiWaiting::wait(const Communicator& group, std::string_view operation, MPI_Request& request, MPI_Status* status) {
  constexpr int kSpins = 1000;       // before it lets others have the core
  constexpr int kBetweenLooks = 16;  // at the clock and for questions
  const auto start = Clock::now();
  for (int64_t polls = 1;; ++polls) {
    int code = MPI_SUCCESS;
    const auto is_over = [&] {
      int done = 0;
      code = MPI_Test(&request, &done, status);
      return code != MPI_SUCCESS || done != 0;
    };
    if (is_over()) return code;
    if (polls < kSpins) continue;
    std::this_thread::yield();
    if (polls % kBetweenLooks != 0) continue;
    answer([&] { return call_of(group, operation); });
    if (Clock::now() - start < timeout_) continue;
    const std::string others = ask(call_of(group, operation), is_over);
    if (others.empty()) return code;
    fail_waiting(group, operation, Clock::now() - start, others,
                 "a rank is stopped, hangs, or reads, writes or computes for longer than the others wait: look at its "
                 "host, or give it more time with comm.timeout");
  }
}

// Who is stopped does not answer; who computes does as soon as it waits for somebody.
std::string MpiWaiting::ask(const std::string& call, const std::function<bool()>& is_over) {
  const auto for_answers = std::max<Clock::duration>(std::chrono::seconds(3), timeout_ / 10);
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  std::vector<std::string> calls(static_cast<size_t>(size));
  calls[static_cast<size_t>(rank)] = call;
  const std::string& question = sent_.emplace_back(std::to_string(++asked_));
  for (int other = 0; other < size; ++other) {
    if (other != rank) send_text(question, other, kAskTag);
  }
  const auto until = Clock::now() + for_answers;
  for (int answers = 1; answers < size && Clock::now() < until; std::this_thread::yield()) {
    if (is_over()) return "";
    answer([&] { return call; });
    if (MPI_Status from{}; probe(kAnswerTag, from)) {
      const std::string said = receive_text(from);
      if (!said.starts_with(question + " ")) continue;  // to an earlier one, after which that rank may have stopped
      calls[static_cast<size_t>(from.MPI_SOURCE)] = said.substr(question.size() + 1);
      ++answers;
    }
  }
  std::vector<int> silent;
  std::string all = "every rank waits";
  for (int other = 0; other < size; ++other) {
    const std::string& said = calls[static_cast<size_t>(other)];
    if (said.empty()) silent.push_back(other);
    all += format("{} rank {} in {}", other == 0 ? ":" : ",", other, said);
  }
  return silent.empty() ? all : "no answer from " + list_ranks(silent);
}

void MpiWaiting::answer(const std::function<std::string()>& call) {
  for (MPI_Status from{}; probe(kAskTag, from);) {
    const std::string question = receive_text(from);
    send_text(sent_.emplace_back(question + " " + call()), from.MPI_SOURCE, kAnswerTag);
  }
}

}  // namespace invar
