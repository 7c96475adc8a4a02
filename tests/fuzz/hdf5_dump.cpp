// An HDF5 file such as a dump: descriptions, values and attributes.
#include "checkpoint/hdf5_file.h"
#include "fuzz/fuzz_input.h"

using namespace invar;

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string path = fuzz::file("x.h5", fuzz::text_of(data, size));
  const auto try_to = [](const std::function<void()>& read) { fuzz::reads_or_refuses({"x.h5"}, read); };
  try_to([&] {
    const Hdf5Reader reader(path);
    for (const char* name : {"step", "config"}) {
      try_to([&] { reader.integer_attribute(name); });
      try_to([&] { reader.text_attribute(name); });
    }
    for (const std::string& name : reader.names()) {
      try_to([&] {
        const Hdf5Info info = reader.info(name);
        if (info.cols() > 65536 || info.rows() < 1) return;
        std::vector<double> values(static_cast<size_t>(info.cols()));
        reader.read_rows<double>(name, {0, 1}, values);
        reader.read_rows<double>(name, {info.rows() - 1, info.rows()}, values);
      });
      try_to([&] { reader.read_strings(name); });
    }
  });
  return 0;
}
