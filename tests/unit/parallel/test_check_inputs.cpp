#include "parallel/check_inputs.h"

#include "comm/thread_communicator.h"
#include "support/rank_checks.h"
#include "support/temporary_folder.h"

using namespace invar;
using namespace invar::test;

namespace {

// Three ranks with these inputs, but for one of them, and one that was launched with them and has no part in it.
void compare(int other, const std::vector<InputPrint>& of_other, const std::string& expected, int idle = 3) {
  const std::vector<InputPrint> inputs = {{"a.bin", 100, 5}, {"a.idx", 40, 6}, {"b.bin", 70, 7}};
  run_thread_ranks(4, [&](Communicator& job) {
    const auto part = job.split(job.rank() == idle ? -1 : 0, 0, "world");
    if (part == nullptr) return;
    Communicator& world = *part;
    std::string message;
    ErrorKind kind = ErrorKind::kData;
    try {
      check_inputs(world.rank() == other ? of_other : inputs, world);
    } catch (const Error& error) {
      message = error.what();
      kind = error.kind();
    }
    CHECK(message == expected);
    CHECK(kind == ErrorKind::kData);
  });
}

}  // namespace

TEST_CASE("ranks with other inputs are named with the first input that differs") {
  compare(-1, {}, "");
  compare(1, {{"/local/a.bin", 100, 5}, {"/local/a.idx", 40, 6}, {"/local/b.bin", 70, 7}}, "");
}

TEST_CASE("every rank says which rank's size or contents are others") {
  compare(1, {{"a.bin", 100, 5}, {"a.idx", 44, 6}, {"b.bin", 70, 7}},
          "rank 1 reads another a.idx than rank 0: 44 bytes, where rank 0 has 40 bytes");
  compare(2, {{"a.bin", 100, 5}, {"a.idx", 40, 6}, {"b.bin", 70, 8}},
          "rank 2 reads another b.bin than rank 0: other contents of 70 bytes");
  compare(0, {{"a.bin", 100, 9}, {"a.idx", 40, 6}, {"b.bin", 70, 8}},
          "rank 1 reads another a.bin than rank 0: other contents of 100 bytes");
}

TEST_CASE("inputs of other names are told with both names, of equal contents too") {
  compare(1, {{"/x/a.bin", 100, 5}, {"/x/c.idx", 40, 6}, {"/x/b.bin", 70, 7}},
          "rank 1 reads another input than rank 0: /x/c.idx, where rank 0 has a.idx");
  // One that comes too early is not taken for the one in its place.
  compare(2, {{"a.bin", 100, 5}, {"b.bin", 70, 7}},
          "rank 2 reads another input than rank 0: b.bin, where rank 0 has a.idx");
  compare(0, {{"a.bin", 100, 5}, {"new.idx", 40, 6}, {"b.bin", 70, 7}},
          "rank 1 reads another input than rank 0: a.idx, where rank 0 has new.idx");
}

TEST_CASE("ranks with other inputs are named as they were launched, where an idle one is left out") {
  const std::vector<InputPrint> others = {{"a.bin", 100, 5}, {"a.idx", 44, 6}, {"b.bin", 70, 7}};
  compare(2, others, "rank 3 reads another a.idx than rank 0: 44 bytes, where rank 0 has 40 bytes", 1);
  compare(1, others, "rank 2 reads another a.idx than rank 1: 44 bytes, where rank 1 has 40 bytes", 0);
}

TEST_CASE("a rank without one of the files is told, on all ranks by its name") {
  const std::vector<InputPrint> inputs = {{"a", 1, 5}, {"b", 2, 6}};
  run_thread_ranks(3, [&](Communicator& world) {
    std::string message;
    try {
      check_inputs(std::span(inputs).first(world.rank() == 2 ? 1 : 2), world);
    } catch (const Error& error) {
      message = error.what();
    }
    CHECK(message == "rank 2 reads another b than rank 0: no such file, where rank 0 has 2 bytes");
  });
  compare(0, {{"a.bin", 100, 5}, {"a.idx", 40, 6}},
          "rank 1 reads another b.bin than rank 0: 70 bytes, where rank 0 has no such file");
}

TEST_CASE("a print tells sizes, ends and pages of a file apart, and is the same at any path") {
  const TemporaryFolder folder;
  const std::string bytes(1'000'000, 'a');
  const auto print = [&](const std::string& name, const std::string& text) {
    return print_of(InputFile(folder.write(name, text)));
  };
  const InputPrint first = print("one", bytes);
  CHECK(first.name == (folder / "one").string());
  CHECK(first.size == 1'000'000);
  CHECK(print("two", bytes).hash == first.hash);
  CHECK(print("two", bytes + "a").size == 1'000'001);
  // The ends, and the first of the pages between them.
  for (const size_t at : {size_t{0}, size_t{65'535}, size_t{934'464}, size_t{999'999}, size_t{65'536 + 54'303}}) {
    INFO(at);
    std::string changed = bytes;
    changed[at] = 'b';
    CHECK(print("two", changed).hash != first.hash);
  }
  for (const int64_t size : {0, 1, 7, 8, 1000, 188'416}) {  // whole
    std::string text(static_cast<size_t>(size), 'a');
    const InputPrint whole = print("small", text);
    for (size_t at = 0; at < text.size(); at += 999) {
      std::string changed = text;
      changed[at] = 'b';
      REQUIRE(print("small", changed).hash != whole.hash);
    }
  }
}
