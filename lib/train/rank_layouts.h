#pragma once

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "models/decoder_model.h"

namespace invar {

// Where every rank of the world keeps its parameters: the real model, built without memory once for each width of a
// replica and tensor rank in it. Not collective.
class RankLayouts {
 public:
  RankLayouts(const DecoderSpec& spec, const Topology& topology, const SumPolicy& sums,
              const DecoderModel::Options& options);
  ~RankLayouts();

  // By world rank.
  std::span<const ParameterTable* const> tables() const { return tables_; }

 private:
  struct Rank;
  std::map<std::pair<int, int>, std::unique_ptr<Rank>> ranks_;
  std::vector<const ParameterTable*> tables_;
};

}  // namespace invar
