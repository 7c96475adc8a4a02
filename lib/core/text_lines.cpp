#include "core/text_lines.h"

#include <algorithm>

#include "core/input_file.h"

namespace invar {

void for_each_line(const std::string& path, const std::function<void(int64_t number, const std::string& line)>& visit,
                   const std::string& hint) {
  constexpr int64_t kBlock = 1 << 20;
  constexpr size_t kLongest = size_t{64} << 20;
  const InputFile file(path, hint);
  int64_t number = 1;
  std::string line, block;
  for (int64_t offset = 0; offset < file.size(); offset += kBlock) {
    block.resize(static_cast<size_t>(std::min(kBlock, file.size() - offset)));
    file.read_at(offset, std::span(block));
    for (size_t begin = 0; begin < block.size();) {
      const size_t end = block.find('\n', begin);
      line.append(block, begin, end - begin);
      if (line.size() > kLongest) {
        throw Error(ErrorKind::kData, format("{}:{}: a line of more than {} bytes", path, number, kLongest), hint);
      }
      if (end == std::string::npos) break;
      visit(number++, line);
      line.clear();
      begin = end + 1;
    }
  }
}

}  // namespace invar
