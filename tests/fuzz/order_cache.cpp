// A kept order of which one file is damaged: the first byte of the input chooses the file, the rest is what it holds.
// Whatever that is, the order that training sees stays the same.
#include "data/order_cache.h"

#include <algorithm>
#include <filesystem>

#include "fuzz/fuzz_input.h"

using namespace invar;

namespace {

struct Kept {
  std::string folder = fuzz::folder() + "/orders";
  StoredArray<int32_t> lengths{std::vector<int32_t>{5, 3, 7, 2, 9}};
  OrderPlan plan = plan_order(lengths, 4, 9, 1234);
  OrderArrays expected = build_order(plan, lengths);
  std::vector<std::string> files;  // sorted

  Kept() {
    keep_order(folder, "corpus", plan, lengths);
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      files.push_back("orders/" + entry.path().filename().string());
    }
    std::ranges::sort(files);
  }
};

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Kept kKept;
  if (size == 0) return 0;
  fuzz::file(kKept.files[data[0] % kKept.files.size()], fuzz::text_of(data + 1, size - 1));
  fuzz::reads_or_refuses({"orders"}, [&] {
    const MegatronOrder order = keep_order(kKept.folder, "corpus", kKept.plan, kKept.lengths).order;
    fuzz::expect(order.document_index.all() == kKept.expected.document_index &&
                     order.sample_index.all() == kKept.expected.sample_index &&
                     order.shuffle_index.all() == kKept.expected.shuffle_index,
                 "another order than the one that was asked for");
  });
  return 0;
}
