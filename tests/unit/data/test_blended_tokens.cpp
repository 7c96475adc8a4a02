#include "data/blended_tokens.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "data_files.h"
#include "support/catch.h"

using namespace invar;
using namespace invar::test;

namespace {

constexpr uint64_t kSeed = 1234;
constexpr TokenRequest kRequest{.sequence_length = 4, .vocab_size = 1000, .seed = kSeed, .samples_wanted = 12};

std::vector<uint16_t> counting_from(uint16_t first, size_t count) {
  std::vector<uint16_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// Two sources, a of 5 samples from token 0 on and b of 10 from token 500 on, of either kind.
class Sources {
 public:
  explicit Sources(DataKind kind) : kind_(kind) {
    add("a", counting_from(0, 21), {5, 3, 7, 2, 4});
    add("b", counting_from(500, 41), {20, 21});
  }

  void add(const std::string& name, const std::vector<uint16_t>& tokens, const std::vector<int32_t>& lengths) {
    folder_.write(name + ".bin", bytes_of(tokens));
    folder_.write(name + ".idx", IndexBytes::of(lengths, 8, 2).bytes());
  }
  std::string path_of(const std::string& name) const {
    return (folder_ / (kind_ == DataKind::kTokens ? name + ".bin" : name)).string();
  }
  // In `text`, @name stands for the path of a source.
  DataConfig blend(std::string text) const {
    DataConfig data = plain();
    for (size_t at = text.find('@'); at != std::string::npos; at = text.find('@')) {
      text.replace(at, 2, path_of(text.substr(at + 1, 1)));
    }
    data.blend = parse_blend(text);
    return data;
  }
  std::unique_ptr<TokenSource> alone(const std::string& name, int64_t samples_wanted) const {
    DataConfig data = plain();
    data.path = path_of(name);
    TokenRequest request = kRequest;
    request.samples_wanted = samples_wanted;
    return make_token_source(data, request);
  }

 private:
  DataConfig plain() const {
    DataConfig data;
    data.kind = kind_;
    data.split = "1";
    if (kind_ == DataKind::kTokens) data.token_dtype = "uint16";
    return data;
  }

  TemporaryFolder folder_;
  DataKind kind_;
};

// The blend has a's and b's samples in the order of these weights; each counts on through its own samplers.
void check_order(const TokenSource& blend, std::span<const double> weights, const TokenSource& a, const TokenSource& b,
                 SampleOrder order) {
  const BlendOrder expected(weights, blend.samples());
  const Sampler of_a(order, a.samples(), kSeed);
  const Sampler of_b(order, b.samples(), kSeed);
  for (int64_t k = 0; k < blend.samples(); ++k) {
    const auto [source, sample] = expected.at(k);
    INFO("sample " << k << " is " << sample << " of source " << source);
    CHECK(sample_of(blend, k) ==
          (source == 0 ? sample_of(a, of_a.sample_at(sample)) : sample_of(b, of_b.sample_at(sample))));
  }
}

}  // namespace

TEST_CASE("a weighted blend of flat files shuffles each within itself, epoch after epoch") {
  const Sources sources(DataKind::kTokens);
  TokenRequest request = kRequest;
  request.samples_wanted = 30;
  const auto blend = make_token_source(sources.blend("0.7 @a 0.3 @b"), request);
  // 21 of a, which has 5: four epochs and a bit.
  REQUIRE(blend->samples() == 30);
  const std::vector<double> weights = normalised(std::vector<double>{0.7, 0.3});
  check_order(*blend, weights, *sources.alone("a", 1), *sources.alone("b", 1), SampleOrder::kShuffled);
  CHECK(contains(blend->describe(), "blend of 2 sources, 30 samples; 21 samples of " + sources.path_of("a")));
  CHECK(contains(blend->describe(), "; 9 samples of " + sources.path_of("b")));
}

TEST_CASE("the validation split of a blend of flat files is read in order") {
  const Sources sources(DataKind::kTokens);
  DataConfig data = sources.blend("0.5 @a 0.5 @b");
  data.validation_fraction = 0.5;
  TokenRequest request = kRequest;
  request.split = Split::kValidation;
  request.samples_wanted = 6;
  const auto blend = make_token_source(data, request);
  REQUIRE(blend->samples() == 6);
  CHECK(sample_of(*blend, 0).front() == 11);
  CHECK(sample_of(*blend, 1).front() == 521);
  CHECK(sample_of(*blend, 2).front() == 15);
  CHECK(sample_of(*blend, 3).front() == 525);
  CHECK(sample_of(*blend, 4).front() == 11);  // a has two
}

TEST_CASE("flat files without weights count by their size, and go on") {
  const Sources sources(DataKind::kTokens);
  TokenRequest request = kRequest;
  request.samples_wanted = 40;
  const auto blend = make_token_source(sources.blend("@a @b"), request);
  REQUIRE(blend->samples() == 40);
  check_order(*blend, std::vector<double>{5, 10}, *sources.alone("a", 1), *sources.alone("b", 1),
              SampleOrder::kShuffled);

  // A single one is what data.path would be.
  const auto one = make_token_source(sources.blend("@b"), request);
  const auto alone = sources.alone("b", 40);
  const Sampler sampler(SampleOrder::kShuffled, alone->samples(), kSeed);
  for (int64_t k = 0; k < 40; ++k) CHECK(sample_of(*one, k) == sample_of(*alone, sampler.sample_at(k)));
}

TEST_CASE("a weighted blend of Megatron datasets lays out what Megatron would") {
  const Sources sources(DataKind::kMegatron);
  const auto blend = make_token_source(sources.blend("0.3 @a 0.7 @b"), kRequest);
  // ceil(12 · 0.3) + ceil(12 · 0.7); laid out for ceil(4 · 1.005) of a and ceil(9 · 1.005) of b.
  REQUIRE(blend->samples() == 13);
  const std::vector<double> weights = normalised(std::vector<double>{0.3, 0.7});
  check_order(*blend, weights, *sources.alone("a", 5), *sources.alone("b", 10), SampleOrder::kSequential);
  CHECK(sample_of(*blend, 0).front() >= 500);

  // 600 of 0.3 are 182 of a with the surplus: 37 epochs, where 180 would be laid out in 36.
  TokenRequest request = kRequest;
  request.samples_wanted = 600;
  const auto longer = make_token_source(sources.blend("0.3 @a 0.7 @b"), request);
  REQUIRE(longer->samples() == 600);
  check_order(*longer, weights, *sources.alone("a", 181), *sources.alone("b", 423), SampleOrder::kSequential);
}

TEST_CASE("Megatron datasets without weights are read once") {
  const Sources sources(DataKind::kMegatron);
  const auto a = sources.alone("a", 0);
  const auto b = sources.alone("b", 0);
  REQUIRE(a->samples() == 5);
  REQUIRE(b->samples() == 10);
  TokenRequest request = kRequest;
  for (const auto& [wanted, size] : {std::pair{12, 12}, {15, 15}, {100, 15}}) {
    request.samples_wanted = wanted;
    const auto blend = make_token_source(sources.blend("@a @b"), request);
    REQUIRE(blend->samples() == size);
    check_order(*blend, std::vector<double>{5, 10}, *a, *b, SampleOrder::kSequential);
  }
  // But a single one goes on, as data.path does.
  request.samples_wanted = 33;
  const auto one = make_token_source(sources.blend("@a"), request);
  const auto alone = sources.alone("a", 33);
  REQUIRE(one->samples() == 33);
  for (int64_t k = 0; k < 33; ++k) CHECK(sample_of(*one, k) == sample_of(*alone, k));
}

TEST_CASE("a Megatron dataset that is taken beyond its surplus is laid out for that") {
  const Sources sources(DataKind::kMegatron);
  // ceil() makes 49 of 10 samples: 1 of each small source, 10 · 40/79 = 6 of b, of which the rule takes 22 in 45.
  std::string text = "40 @b";
  for (int i = 0; i < 39; ++i) text += " 1 @a";
  TokenRequest request = kRequest;
  request.samples_wanted = 10;
  const auto blend = make_token_source(sources.blend(text), request);
  REQUIRE(blend->samples() == 45);
  CHECK(contains(blend->describe(), "45 samples; 22 samples of " + sources.path_of("b")));
  CHECK(contains(blend->describe(), "; and 24 more"));
  const auto b = sources.alone("b", 22);
  std::vector<double> weights(40, 1.0);
  weights[0] = 40;
  const BlendOrder order(normalised(weights), 45);
  for (int64_t k = 0; k < 45; ++k) {
    if (order.at(k).source == 0) CHECK(sample_of(*blend, k) == sample_of(*b, order.at(k).sample));
  }
}

TEST_CASE("a blend that reads no sample twice ends where a source does, whatever is wanted") {
  for (const DataKind kind : {DataKind::kTokens, DataKind::kMegatron}) {
    const Sources sources(kind);  // 5 samples and 10
    TokenRequest request = kRequest;
    request.once = true;
    for (const char* text : {"1 @a 1 @b", "3 @a 1 @b", "1 @a 9 @b", "@a @b", "1 @a", "@b"}) {
      INFO(text);
      std::set<std::vector<int32_t>> all;
      for (const int64_t wanted : {3, 8, 16, 1000}) {
        request.samples_wanted = wanted;
        const auto blend = make_token_source(sources.blend(text), request);
        std::set<std::vector<int32_t>> read;
        for (int64_t k = 0; k < blend->samples(); ++k) read.insert(sample_of(*blend, k));
        CHECK(std::ssize(read) == blend->samples());
        CHECK(std::ranges::includes(read, all));  // the first ones stay, and others follow
        all = read;
      }
      const bool one =
          std::string(text).find("@a") == std::string::npos || std::string(text).find("@b") == std::string::npos;
      CHECK(std::ssize(all) >= (one ? 5 : 6));
      if (std::string(text) == "1 @a 1 @b") CHECK(std::ssize(all) == 10);
      if (std::string(text) == "@a @b") CHECK(std::ssize(all) == 15);
    }
  }
}

TEST_CASE("a source that a blend cannot use is named") {
  Sources sources(DataKind::kMegatron);
  require_error(ErrorKind::kData, {"source 2 of data.blend: " + sources.path_of("n") + ".idx: cannot be opened"},
                [&] { make_token_source(sources.blend("1 @a 1 @n"), kRequest); });
  sources.add("s", counting_from(0, 4), {4});
  require_error(ErrorKind::kData, {"source 1 of data.blend: " + sources.path_of("s") + " has less than one sample"},
                [&] { make_token_source(sources.blend("@s @a"), kRequest); });
  CHECK(make_token_source(sources.blend("1 @s 1 @a"), kRequest)->samples() == 12);  // four tokens again and again
  DataConfig data = sources.blend("1 @a 1 @s");
  data.split = "9,1";
  TokenRequest request = kRequest;
  request.split = Split::kValidation;
  require_error(ErrorKind::kData, {"source 2 of data.blend: data.split = \"9,1\" leaves no sequence of 1 for part 2"},
                [&] { make_token_source(data, request); });
  require_error(ErrorKind::kConfig, {"some paths have no weight"},
                [&] { make_token_source(sources.blend("1 @a @b"), kRequest); });
}
