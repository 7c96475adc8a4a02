#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/range.h"

namespace invar::app {

enum class TensorFileKind : uint8_t { kDump, kSafetensors };

// A file of named tensors, read in blocks so that it may be larger than memory. Values come as double, in which every
// f32, f16, bf16, i32 and token id is exact. Error{kData} for a file that cannot be used.
class TensorFile {
 public:
  struct Info {
    std::string dtype;
    bool is_integer = false;
    std::vector<int64_t> shape;

    // The tensor as a matrix: all dims but the last × the last. A vector is (n, 1).
    int64_t elements() const { return rows() * cols(); }
    int64_t rows() const;
    int64_t cols() const;
  };

  virtual ~TensorFile() = default;
  virtual TensorFileKind kind() const = 0;
  virtual std::vector<std::string> names() const = 0;
  // What else it holds that is never compared, such as "3 tensors of vision"; empty if nothing.
  virtual std::string describe_left_out() const { return ""; }
  // The number of elements is checked: it can be held in an int64_t, and the file has bytes for them.
  virtual Info info(const std::string& name) const = 0;
  // Rows of the matrix view into out of exactly that size.
  virtual void read_rows(const std::string& name, Range rows, std::span<double> out) const = 0;
};

// An HDF5 file, such as a step's dump.
std::unique_ptr<TensorFile> open_dump(const std::filesystem::path& path);

// A safetensors file or a Hugging Face folder. The expected.safetensors of a reference case holds the tokens of all its
// steps, (steps, B, S + 1). They are shown as a dump has them: tokens and labels (B, S), of the first step, as its
// activations and gradients are. Tensors of a multimodal model have the names of its text model, and those of other
// modalities are left out. F64 is read as F32.
std::unique_ptr<TensorFile> open_safetensors(const std::filesystem::path& path);

}  // namespace invar::app
