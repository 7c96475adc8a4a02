#include "data/order_cache.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <functional>
#include <set>
#include <thread>

#include "data_files.h"
#include "support/catch.h"
#include "support/file_size_limit.h"

using namespace invar;
using namespace invar::test;

namespace fs = std::filesystem;

namespace {

const std::vector<std::string> kArrays = {"document_index.npy", "sample_index.npy", "shuffle_index.npy"};

constexpr TokenRequest kRequest{.sequence_length = 4, .vocab_size = 26, .seed = 1234, .samples_wanted = 9};

// Sequences of 5, 3, 7, 2 and 9 tokens, numbered 0 to 25.
class Dataset {
 public:
  Dataset() {
    std::vector<uint16_t> tokens(26);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<uint16_t>(i);
    folder.write("corpus.bin", bytes_of(tokens));
    folder.write("corpus.idx", IndexBytes::of({5, 3, 7, 2, 9}, 8, 2).bytes());
  }

  DataConfig config(bool cached = true) const {
    DataConfig data;
    data.kind = DataKind::kMegatron;
    data.path = (folder / "corpus").string();
    data.split = "1";
    if (cached) data.cache_dir = cache().string();
    return data;
  }
  fs::path cache() const { return folder / "cache/orders"; }
  std::set<std::string> cache_files() const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(cache())) names.insert(entry.path().filename().string());
    return names;
  }
  // The one file of the cache with this ending.
  fs::path file(const std::string& ending) const {
    fs::path found;
    for (const std::string& name : cache_files()) {
      if (!name.ends_with(ending)) continue;
      REQUIRE(found.empty());
      found = cache() / name;
    }
    REQUIRE(!found.empty());
    return found;
  }

  TemporaryFolder folder;
};

bool was_built(const TokenSource& source) {
  const std::string text = source.describe();
  const bool built = contains(text, "; order built and kept as ");
  INFO(text);
  CHECK(built != contains(text, "; order read from "));
  return built;
}

std::vector<std::vector<int32_t>> samples_of(const TokenSource& source) {
  std::vector<std::vector<int32_t>> samples;
  for (int64_t k = 0; k < source.samples(); ++k) samples.push_back(sample_of(source, k));
  return samples;
}

// Opens the source; whether its order was built.
bool builds(const DataConfig& data, const TokenRequest& request = kRequest) {
  return was_built(*make_token_source(data, request));
}

// A process of its own that runs `body`, whose result is the exit code.
pid_t start(const std::function<int()>& body) {
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child > 0) return child;
  int code = 99;
  try {
    code = body();
  } catch (...) {
    code = 98;
  }
  ::_exit(code);
}

int status_of(pid_t child) {
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return status;
}

}  // namespace

TEST_CASE("an order is built once, then mapped, and gives the same samples") {
  const Dataset dataset;
  const auto plain = make_token_source(dataset.config(false), kRequest);
  const auto built = make_token_source(dataset.config(), kRequest);
  const auto mapped = make_token_source(dataset.config(), kRequest);
  CHECK(was_built(*built));
  CHECK_FALSE(was_built(*mapped));
  CHECK_FALSE(contains(plain->describe(), "order"));
  REQUIRE(plain->samples() == 12);
  CHECK(samples_of(*built) == samples_of(*plain));
  CHECK(samples_of(*mapped) == samples_of(*plain));
}

TEST_CASE("the arrays are the .npy files that Megatron keeps") {
  const Dataset dataset;
  REQUIRE(builds(dataset.config()));
  const auto array = [&](const std::string& ending, const std::string& header) {
    const std::string bytes = read_file(dataset.file(ending));
    CHECK(bytes.substr(0, 10) == std::string("\x93NUMPY\x01\x00\x76\x00", 10));
    CHECK(bytes.substr(10, header.size()) == header);
    CHECK(bytes.substr(10 + header.size(), 118 - header.size()) == std::string(117 - header.size(), ' ') + "\n");
    return bytes.substr(128);
  };
  CHECK(values_of<int32_t>(array("document_index.npy", "{'descr': '<i4', 'fortran_order': False, 'shape': (10,), }")) ==
        std::vector<int32_t>{4, 0, 1, 2, 3, 3, 2, 1, 0, 4});
  CHECK(values_of<int32_t>(array("sample_index.npy", "{'descr': '<i4', 'fortran_order': False, 'shape': (13, 2), }")) ==
        std::vector<int32_t>{0, 0, 0, 4, 0, 8, 1, 3, 2, 2, 3, 3, 4, 0, 6, 0, 6, 4, 7, 1, 8, 2, 9, 1, 9, 5});
  CHECK(values_of<uint32_t>(array("shuffle_index.npy", "{'descr': '<u4', 'fortran_order': False, 'shape': (12,), }")) ==
        std::vector<uint32_t>{0, 4, 3, 2, 5, 1, 7, 6, 9, 8, 11, 10});
  const std::string description = read_file(dataset.file("description.txt"));
  for (const char* part : {"corpus\n", "sequences [0, 5)", "sequence length: 4", "seed: 1234",
                           "epochs: 2, the last shuffled apart", "samples: 12"}) {
    CHECK(contains(description, part));
  }
}

TEST_CASE("what an order depends on makes another one") {
  const Dataset dataset;
  REQUIRE(builds(dataset.config()));
  const auto with = [&](auto change) {
    TokenRequest request = kRequest;
    change(request);
    return builds(dataset.config(), request);
  };
  CHECK(with([](auto& r) { r.seed = 5; }));
  CHECK(with([](auto& r) { r.sequence_length = 3; }));
  CHECK(with([](auto& r) { r.samples_wanted = 6; }));        // one epoch
  CHECK(with([](auto& r) { r.samples_wanted = 12; }));       // two epochs shuffled together
  CHECK_FALSE(with([](auto& r) { r.samples_wanted = 8; }));  // two epochs, the last apart, as for 9
  DataConfig other = dataset.config();
  other.split = "4,1";
  CHECK(builds(other));
  // The same path, other sequences.
  dataset.folder.write("corpus.idx", IndexBytes::of({3, 5, 7, 2, 9}, 8, 2).bytes());
  CHECK(builds(dataset.config()));
  CHECK(dataset.cache_files().size() == 7 * 5);  // three arrays, a description and a lock each
}

TEST_CASE("damaged files are made anew") {
  const Dataset dataset;
  REQUIRE(builds(dataset.config()));
  const auto expected = samples_of(*make_token_source(dataset.config(false), kRequest));
  const auto check = [&](const std::string& ending, const std::string& what, const std::string& bytes) {
    INFO(ending << " " << what);
    write_file(dataset.file(ending), bytes);
    const auto source = make_token_source(dataset.config(), kRequest);
    CHECK(was_built(*source));
    REQUIRE(source->warnings().size() == 1);
    CHECK(contains(source->warnings().front(), dataset.file(ending).string()));
    CHECK(samples_of(*source) == expected);
    const auto again = make_token_source(dataset.config(), kRequest);
    CHECK_FALSE(was_built(*again));
    CHECK(again->warnings().empty());
  };
  auto endings = kArrays;
  endings.push_back("description.txt");
  for (const std::string& ending : endings) {
    const std::string good = read_file(dataset.file(ending));
    check(ending, "empty", "");
    check(ending, "cut in its header", good.substr(0, 50));
    check(ending, "without its last byte", good.substr(0, good.size() - 1));
    check(ending, "longer", good + "x");
    std::string changed = good;
    changed[30] ^= 1;
    check(ending, "with another header", changed);
    changed = good;
    changed[good.size() - 2] ^= 1;
    check(ending, "with another last value", changed);
    fs::remove(dataset.file(ending));
    CHECK(builds(dataset.config()));
  }
}

TEST_CASE("a blend tells of the damaged order of any source") {
  const Dataset dataset;
  DataConfig data = dataset.config();
  data.path = "";
  data.blend = parse_blend("1 " + (dataset.folder / "corpus").string());
  (void)make_token_source(data, kRequest);
  write_file(dataset.file("shuffle_index.npy"), "");
  const std::vector<std::string> warnings = make_token_source(data, kRequest)->warnings();
  REQUIRE(warnings.size() == 1);
  CHECK(contains(warnings.front(), "shuffle_index.npy is damaged: the order is made anew"));
}

TEST_CASE("a kept order that cannot be read is refused, and not made anew") {
  const Dataset dataset;
  REQUIRE(builds(dataset.config()));
  for (const char* ending : {"shuffle_index.npy", "description.txt"}) {
    const fs::path file = dataset.file(ending);
    const std::string good = read_file(file);
    const auto refused = [&](const std::string& reason) {
      require_error(ErrorKind::kData, {"data.cache_dir: " + file.string(), reason}, {"readable"},
                    [&] { make_token_source(dataset.config(), kRequest); });
    };
    fs::remove(file);
    fs::create_symlink(file, file);
    refused("cannot be looked at: Too many levels of symbolic links");
    fs::remove(file);
    fs::create_directory(file);
    refused("not a regular file");
    fs::remove(file);
    write_file(file, good);
    CHECK_FALSE(builds(dataset.config()));
  }
}

TEST_CASE("a full disk under data.cache_dir is a fault of the machine") {
  const Dataset dataset;
  dataset.folder.write("corpus.idx", IndexBytes::of(std::vector<int32_t>(10'000, 5), 1, 1).bytes());
  dataset.folder.write("corpus.bin", std::string(50'000, '\1'));
  const FileSizeLimit limit(60'000);
  require_error(ErrorKind::kFault, {"data.cache_dir: ", "sample_index.npy.tmp: cannot be written: File too large"},
                {"another disk"}, [&] { make_token_source(dataset.config(), kRequest); });
}

TEST_CASE("a changed value anywhere in a kept order makes it anew, and each rank takes the same") {
  const Dataset dataset;
  REQUIRE(builds(dataset.config()));
  const auto expected = samples_of(*make_token_source(dataset.config(false), kRequest));
  for (const std::string& ending : kArrays) {
    const std::string good = read_file(dataset.file(ending));
    for (size_t byte = 128; byte < good.size(); ++byte) {
      INFO(ending << " byte " << byte);
      std::string changed = good;
      changed[byte] ^= 4;
      write_file(dataset.file(ending), changed);
      std::array<std::unique_ptr<TokenSource>, 3> sources;
      std::vector<std::thread> ranks;
      for (auto& source : sources) {
        ranks.emplace_back([&] { source = make_token_source(dataset.config(), kRequest); });
      }
      for (auto& rank : ranks) rank.join();
      int built = 0;
      for (const auto& source : sources) {
        built += was_built(*source);
        REQUIRE(samples_of(*source) == expected);
      }
      REQUIRE(built == 1);
      REQUIRE(read_file(dataset.file(ending)) == good);
    }
  }
}

TEST_CASE("an order that was kept without checksums is built once more under the same name") {
  const Dataset dataset;
  REQUIRE(builds(dataset.config()));
  const fs::path description = dataset.file("description.txt");
  const std::string text = read_file(description);
  write_file(description, text.substr(0, text.find("checksums of the arrays")));
  CHECK(builds(dataset.config()));
  CHECK(read_file(description) == text);
  CHECK(dataset.cache_files().size() == 5);
  CHECK_FALSE(builds(dataset.config()));
}

TEST_CASE("files of a Megatron dataset that shrink while they are read are told with both sizes") {
  const Dataset dataset;
  REQUIRE(builds(dataset.config()));
  const auto shrink = [&](const fs::path& file) {
    const auto source = make_token_source(dataset.config(), kRequest);
    const auto size = static_cast<int64_t>(fs::file_size(file));
    const std::string bytes = read_file(file);
    fs::resize_file(file, 8);
    require_error(ErrorKind::kData,
                  {format("{}: the file has shrunk: {} bytes when it was opened, 8 now", file.string(), size)},
                  [&] { samples_of(*source); });
    write_file(file, bytes);
  };
  shrink(dataset.folder / "corpus.bin");
  shrink(dataset.folder / "corpus.idx");
  for (const std::string& ending : kArrays) shrink(dataset.file(ending));
}

TEST_CASE("processes that start together build once") {
  const Dataset dataset;
  // Long enough that they meet: 200 000 sequences, one sample each.
  dataset.folder.write("corpus.idx", IndexBytes::of(std::vector<int32_t>(200'000, 5), 1, 1).bytes());
  dataset.folder.write("corpus.bin", std::string(1'000'000, '\1'));
  std::array<int, 2> gate{};
  REQUIRE(::pipe(gate.data()) == 0);
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i) {
    children.push_back(start([&] {
      char byte;
      ::close(gate[1]);
      if (::read(gate[0], &byte, 1) != 0) return 97;  // waits until the parent closes its end
      const auto source = make_token_source(dataset.config(), kRequest);
      const bool right = source->samples() == 249'999 && sample_of(*source, 200'000) == std::vector<int32_t>(5, 1);
      return !right ? 96 : contains(source->describe(), "built") ? 1 : 0;
    }));
  }
  ::close(gate[0]);
  ::close(gate[1]);
  int built = 0;
  for (const pid_t child : children) {
    const int status = status_of(child);
    REQUIRE(WIFEXITED(status));
    INFO("exit code " << WEXITSTATUS(status));
    REQUIRE(WEXITSTATUS(status) <= 1);
    built += WEXITSTATUS(status);
  }
  CHECK(built == 1);
  CHECK(dataset.cache_files().size() == 5);
}

TEST_CASE("threads that start together build once") {
  const Dataset dataset;
  const DataConfig data = dataset.config();
  std::array<std::unique_ptr<TokenSource>, 4> sources;
  std::vector<std::thread> ranks;
  for (auto& source : sources) ranks.emplace_back([&] { source = make_token_source(data, kRequest); });
  for (auto& rank : ranks) rank.join();
  int built = 0;
  for (const auto& source : sources) built += was_built(*source);
  CHECK(built == 1);
}

TEST_CASE("a process that is killed while it writes leaves nothing that is accepted") {
  const Dataset dataset;
  // document_index has 40 128 bytes, sample_index 100 128: the kernel kills the writer of the latter.
  dataset.folder.write("corpus.idx", IndexBytes::of(std::vector<int32_t>(10'000, 5), 1, 1).bytes());
  dataset.folder.write("corpus.bin", std::string(50'000, '\1'));
  const pid_t child = start([&] {
    const rlimit limit{60'000, 60'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    ::signal(SIGXFSZ, SIG_DFL);
    const rlimit no_core{0, 0};
    ::setrlimit(RLIMIT_CORE, &no_core);
    make_token_source(dataset.config(), kRequest);
    return 0;
  });
  const int status = status_of(child);
  REQUIRE(WIFSIGNALED(status));
  REQUIRE(WTERMSIG(status) == SIGXFSZ);
  CHECK(fs::file_size(dataset.file("document_index.npy")) == 40'128);
  CHECK(fs::file_size(dataset.file("sample_index.npy.tmp")) == 60'000);
  CHECK(dataset.cache_files().size() == 3);  // and the lock, which nobody holds
  CHECK(builds(dataset.config()));
  CHECK(dataset.cache_files().size() == 5);
  CHECK_FALSE(builds(dataset.config()));
}

TEST_CASE("a folder that cannot be written is a mistake in data.cache_dir") {
  const Dataset dataset;
  DataConfig data = dataset.config();
  data.cache_dir = (dataset.folder / "corpus.bin").string();
  require_error(ErrorKind::kConfig, {"data.cache_dir: " + data.cache_dir + ": cannot be made"},
                {"name a folder that is one"}, [&] { make_token_source(data, kRequest); });
  data.cache_dir = "/proc/orders";
  require_error(ErrorKind::kConfig, {"data.cache_dir: /proc/orders"}, {"name a folder"},
                [&] { make_token_source(data, kRequest); });
  // What is there can be read without a lock.
  REQUIRE(builds(dataset.config()));
  fs::remove(dataset.file(".lock"));
  fs::create_directory(dataset.cache() / (dataset.file("description.txt").filename().string().substr(0, 16) + ".lock"));
  CHECK_FALSE(builds(dataset.config()));
}
