// The metrics.jsonl of a run, with state hashes.
#include "app/compare_metrics.h"
#include "fuzz/fuzz_input.h"

using namespace invar;

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string path = fuzz::file("metrics.jsonl", fuzz::text_of(data, size));
  fuzz::reads_or_refuses({"metrics.jsonl"}, [&] { app::read_digests(path); });
  fuzz::reads_or_refuses({"metrics.jsonl", "no step with a loss in common"}, [&] {
    const app::MetricsTable table = app::read_metrics(path);
    fuzz::expect(app::compare_metrics(table, table, {.exact = true}).inside(), "metrics differ from themselves");
  });
  return 0;
}
