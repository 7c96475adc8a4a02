#include "train/train_state.h"

#include <algorithm>
#include <map>
#include <utility>

#include "checkpoint/hf_weights.h"
#include "config/resolved.h"
#include "config/validation.h"
#include "device/device.h"
#include "ops/block_hashes.h"
#include "ops/elementwise.h"
#include "ops/sample_sums.h"
#include "train/rank_layouts.h"
#include "train/run_contract.h"

namespace invar {
namespace {

Stream with_numerics(const Config& config, Stream stream) {
  stream.set_invariant(config.numerics.reduction == Reduction::kInvariant);
  return stream;
}

std::optional<WorkerOrder> order_of(const std::optional<NumericsContract>& contract, const Config& config,
                                    const ProcessGroups& groups) {
  if (!contract) return std::nullopt;
  static_assert(kMostMicroBatch == ops::kMostSamples);
  const int64_t batch = global_batch_size(config, groups.world->size());
  std::vector<Range> samples;
  for (int replica = 0; replica < groups.topology.data; ++replica) {
    samples.push_back(groups.topology.samples_of(batch, replica));
  }
  return WorkerOrder(contract->workers, batch, samples, groups.data_rank(), config.train.micro_batch_size);
}

DecoderModel::Options options_of(const Config& config, const ProcessGroups& groups,
                                 const std::optional<NumericsContract>& contract,
                                 const std::optional<WorkerOrder>& order) {
  DecoderModel::Options options;
  if (contract) options.contract = &*contract;
  if (order) options.samples = &*order;
  options.sequence_parallel = config.parallel.sequence && groups.topology.tensor > 1;
  options.recompute = config.train.recompute;
  options.dtype = config.numerics.precision == Precision::kBF16 ? DType::kBF16 : DType::kF32;
  if (config.numerics.tensor_reduce_dtype == Precision::kBF16) options.reduce_dtype = DType::kBF16;
  options.sequence_length = config.train.sequence_length;
  return options;
}

int64_t hash_blocks_of(const ParameterTable& table) {
  int64_t blocks = 0;
  for (const Weight& weight : table.weights()) {
    for (const Parameter& parameter : weight.parameters) blocks += hash_blocks(parameter.numel());
  }
  return blocks;
}

// The table once it has its layout, on which ownership and optimizer are built.
const ParameterTable& allocated(DecoderModel& model, const Stream& stream, Arena& parameters, Arena& gradients,
                                Arena& constants) {
  model.allocate(stream, parameters, gradients, constants);
  return model.parameters();
}

RowOwnership ownership_of(const Config& config, const ParameterTable& table, const ProcessGroups& groups,
                          const DecoderModel::Options& options) {
  const Topology& topology = groups.topology;
  const int64_t bucket_elements = config.parallel.bucket_size * topology.tensor;
  if (topology.uniform()) return {table, topology.data, groups.data_rank(), bucket_elements};
  const RankLayouts layouts(decoder_spec(config.model), topology, options);
  return {topology, layouts.tables(), groups.world->rank(), bucket_elements};
}

// The optimizer's state as host pointers: to itself on the CPU, else to a copy.
struct HostState {
  struct Own {
    WeightId weight;
    Range elements;
    float* master;
    float* exp_avg;
    float* exp_avg_sq;
  };

  HostState(const Stream& stream, const std::vector<AdamW::OwnState>& owned) {
    int64_t total = 0;
    for (const AdamW::OwnState& own : owned) total += 3 * own.elements.size();
    if (stream.device() == DeviceType::kCuda) {
      values = std::make_shared<std::vector<float>>();
      resize_copy(*values, total);
    }
    float* next = values != nullptr ? values->data() : nullptr;
    const auto in_host = [&](const Tensor& tensor) {
      if (next == nullptr) return tensor.data<float>();
      float* const at = std::exchange(next, next + tensor.numel());
      copy_across(stream, tensor, Tensor(at, DType::kF32, DeviceType::kCpu, tensor.shape()));
      return at;
    };
    for (const AdamW::OwnState& own : owned) {
      float* const master = in_host(own.master);
      float* const exp_avg = in_host(own.exp_avg);
      states.push_back({own.weight, own.elements, master, exp_avg, in_host(own.exp_avg_sq)});
    }
  }

  std::shared_ptr<std::vector<float>> values;  // of the copy
  std::vector<Own> states;
};

}  // namespace

TrainState::TrainState(const Config& config, const ProcessGroups& groups, const Stream& stream,
                       const MemorySizes& capacity)
    : groups_(groups),
      stream_(with_numerics(config, stream)),
      sequence_length_(config.train.sequence_length),
      contract_(run_contract(config, stream)),
      order_(order_of(contract_, config, groups)),
      parameters_("parameters", stream.device(), capacity.parameters),
      gradients_("gradients", stream.device(), capacity.gradients),
      optimizer_memory_("optimizer", stream.device(), capacity.optimizer),
      constants_("constants", stream.device(), capacity.constants),
      saved_("saved activations", stream.device(), capacity.saved),
      scratch_("scratch", stream.device(), capacity.scratch),
      workspace_{stream_, saved_, scratch_},
      model_(decoder_spec(config.model), groups, options_of(config, groups, contract_, order_)),
      ownership_(ownership_of(config, allocated(model_, stream_, parameters_, gradients_, constants_), groups,
                              options_of(config, groups, contract_, order_))),
      sync_(model_.parameters(), ownership_, groups, stream_, order_ ? &*order_ : nullptr, gradients_),
      optimizer_(model_.parameters(), ownership_, config.optimizer) {
  model_.listen({[this](WeightId id) { sync_.await_values(id); }, [this](WeightId id) { sync_.gradient_done(id); }});
  optimizer_.allocate(optimizer_memory_);
  const int64_t tokens = config.train.micro_batch_size * config.train.sequence_length;
  const int64_t batch = global_batch_size(config, groups.world->size());
  const int64_t own_samples = groups.topology.samples_of(batch, groups.data_rank()).size();
  loss_sums_ = constants_.allocate("losses", DType::kF64, {own_samples});
  if (order_) {
    counted_rows_ = counted_rows(model_.parameters(), ownership_);
    int64_t rows = 0;
    for (const ops::RowBlock& counted : counted_rows_) rows += counted.rows;
    row_squares_.squares = constants_.allocate("sums of squares", DType::kF64, {rows});
    row_squares_.digits = constants_.allocate("digits of their sum", DType::kI64, {ExactSum::kDigits});
  } else {
    counted_ = counted_ranges(model_.parameters(), ownership_);
    squares_ = constants_.allocate("sum of squares", DType::kF64, {1});
  }
  tokens_ = constants_.allocate("tokens", DType::kI32, {tokens});
  labels_ = constants_.allocate("labels", DType::kI32, {tokens});
  if (config.data.reset_at_eod) document_starts_ = constants_.allocate("document starts", DType::kI32, {tokens});
  const ArenaScope given_back(scratch_);
  block_hashes_ = scratch_.allocate("hashes of blocks", DType::kI64, {hash_blocks_of(model_.parameters())});
}

MicroBatch TrainState::to_device(const Batch& batch) {
  INVAR_CHECK(std::ssize(batch.tokens) == tokens_.dim(0), "micro-batch of {} tokens, room for {}", batch.tokens.size(),
              tokens_.dim(0));
  const auto give = [&](const std::vector<int32_t>& ids, const Tensor& to) {
    std::vector<int32_t> from = ids;
    copy_across(stream_, view_of(from), to);
  };
  give(batch.tokens, tokens_);
  give(batch.labels, labels_);
  INVAR_CHECK(batch.document_starts.empty() != document_starts_.defined(),
              "document starts of {} tokens, data.reset_at_eod is {}", batch.document_starts.size(),
              document_starts_.defined());
  if (document_starts_.defined()) {
    give(batch.document_starts, document_starts_);
  }
  return on_device();
}

void TrainState::zero_gradients() {
  // Workers clear the other buffers. What nobody adds to (constants, padding) is as the arena was made there: zero.
  ops::zero(stream_, model_.parameters().gradients(0));
}

// Where the losses of its samples go.
Tensor TrainState::next_losses(const Batch& batch) {
  const int64_t samples = std::ssize(batch.tokens) / sequence_length_;
  return loss_sums_.rows(samples_, samples_ + samples);
}

void TrainState::forward_backward(const Batch& batch, float gradient_scale, TensorSink* sink, Turn turn) {
  if (turn == Turn::kLast) sync_.begin_last_micro_batch();
  const Tensor losses = next_losses(batch);
  model_.forward_backward(workspace_, to_device(batch), gradient_scale, losses, samples_, sink);
  samples_ += losses.dim(0);
}

void TrainState::evaluate(const Batch& batch, TensorSink* sink) {
  const Tensor losses = next_losses(batch);
  model_.evaluate(workspace_, to_device(batch), losses, sink);
  samples_ += losses.dim(0);
}

ExactSum TrainState::take_loss() {
  std::vector<double> losses(static_cast<size_t>(loss_sums_.dim(0)));
  copy_across(stream_, loss_sums_, view_of(losses));
  ops::zero(stream_, loss_sums_);
  samples_ = 0;
  ExactSum sum;
  for (const double loss : losses) sum.add(loss);
  return sum;
}

double TrainState::finish_gradients() {
  set_phase(stream_, "sums and norm of the gradients");
  sync_.finish();
  const Tensor& gradients = model_.parameters().flat_gradients();
  const double norm = order_ ? gradient_norm(stream_, gradients, counted_rows_, *groups_.world, row_squares_)
                             : gradient_norm(stream_, gradients, counted_, *groups_.world, squares_);
  set_phase(stream_, "");
  return norm;
}

void TrainState::update(int64_t step, double lr, double gradient_scale) {
  set_phase(stream_, "optimizer");
  optimizer_.update(stream_, step, lr, gradient_scale, [this](size_t bucket) { sync_.publish(bucket); });
  set_phase(stream_, "");
}

void TrainState::load(const CheckpointReader& reader) {
  const StatePart part = own_part(Copies::kAll);
  reader.require(part.tensors);
  reader.read(part, stream_.threads());
  upload(part);
  optimizer_.publish_masters(stream_);
  for (size_t b = 0; b < ownership_.buckets().size(); ++b) sync_.publish(b);
}

// The whole host copy back to the device.
void TrainState::upload(const StatePart& part) {
  if (part.host_copy == nullptr) return;
  float* next = part.host_copy->data();
  for (const AdamW::OwnState& own : optimizer_.own_states()) {
    for (const Tensor& tensor : {own.master, own.exp_avg, own.exp_avg_sq}) {
      copy_across(stream_, Tensor(next, DType::kF32, DeviceType::kCpu, tensor.shape()), tensor);
      next += tensor.numel();
    }
  }
}

StatePart TrainState::own_part(Copies copies) const {
  StatePart part;
  std::map<const Parameter*, size_t> first_tensor;  // master, then the moments if it has some
  for (const Weight& weight : parameters().weights()) {
    for (const Parameter& parameter : weight.parameters) {
      first_tensor[&parameter] = part.tensors.size();
      part.tensors.emplace_back("model", parameter);
      if (!parameter.trained) continue;
      part.tensors.emplace_back("optimizer/exp_avg", parameter);
      part.tensors.emplace_back("optimizer/exp_avg_sq", parameter);
    }
  }
  const HostState host(stream_, optimizer_.own_states());
  part.host_copy = host.values;
  for (const HostState::Own& own : host.states) {
    const Weight& weight = parameters().weight(own.weight);
    const Range stored{(own.elements.begin - weight.offset) / weight.cols,
                       (own.elements.end - weight.offset) / weight.cols};
    for (const Parameter& parameter : weight.parameters) {
      const size_t tensor = first_tensor.at(&parameter);
      // Whole parameters in turn, so that the copies of many spread over the ranks.
      const bool elsewhere = !ownership_.exclusive() && parameter.replicas != nullptr &&
                             tensor / 3 % static_cast<size_t>(parameter.replicas->size()) !=
                                 static_cast<size_t>(parameter.replicas->rank());
      if (copies == Copies::kOne && elsewhere) continue;
      for (const RowRun& run : parameter.runs) {
        const int64_t shift = run.global.begin - run.local;  // from rows of storage to rows of the tensor
        const Range rows = intersect(run.global, {stored.begin + shift, stored.end + shift});
        if (rows.empty()) continue;
        const int64_t at = (rows.begin - shift - stored.begin) * weight.cols;
        part.runs.push_back({tensor, rows, own.master + at});
        if (!parameter.trained) continue;
        part.runs.push_back({tensor + 1, rows, own.exp_avg + at});
        part.runs.push_back({tensor + 2, rows, own.exp_avg_sq + at});
      }
    }
  }
  return part;
}

void TrainState::dry_run() {
  sync_.begin_last_micro_batch();
  model_.forward_backward(workspace_, on_device(), 1.0f, loss_sums_.rows(0, tokens_.dim(0) / sequence_length_));
  finish_gradients();
  update(1, 0.0, 1.0);
}

MemorySizes TrainState::used() const {
  return {parameters_.high_water(), gradients_.high_water(), optimizer_memory_.high_water(),
          constants_.high_water(),  saved_.high_water(),     scratch_.high_water(),
          stream_.momentary()};
}

namespace {

// A rank without bytes and without peers: the real code runs on it and moves nothing.
struct MetaRank {
  MetaRank(const Config& config, const Topology& topology, int world_rank, TrafficTable* traffic,
           DeviceType target = DeviceType::kCpu)
      : world(make_recording_communicator(world_rank, topology.world(), "world", traffic)),
        groups(make_process_groups(*world, topology, GroupMaker(traffic))),
        stream(Stream::meta(target)),
        state(config, groups, stream, {}) {}

  std::unique_ptr<Communicator> world;
  ProcessGroups groups;
  Stream stream;
  TrainState state;
};

// Where the data ranks cut the rows of which this tensor rank holds copies, by name and first row.
using CopyCuts = std::map<std::pair<std::string, int64_t>, std::vector<Range>>;

void add_copy_cuts(const TrainState& state, CopyCuts& cuts, bool& alike) {
  const RowOwnership& ownership = state.ownership();
  for (const WeightId id : state.parameters().layout()) {
    const Weight& weight = state.parameters().weight(id);
    const RowOwnership::Bucket& bucket = ownership.buckets()[ownership.bucket_of(id)];
    for (const Parameter& parameter : weight.parameters) {
      if (parameter.replicas == nullptr || parameter.replicas->size() == 1 || !parameter.trained) continue;
      for (const RowRun& run : parameter.runs) {
        const int64_t begin = weight.offset + run.local * weight.cols - bucket.elements.begin;
        std::vector<Range> cut;
        int64_t next = 0;
        for (const int64_t count : bucket.blocks.front().counts) {
          const Range own = intersect(Range{next, next + count}, {begin, begin + run.global.size() * weight.cols});
          cut.push_back(own.empty() ? Range{} : Range{own.begin - begin, own.end - begin});
          next += count;
        }
        alike &= cuts.try_emplace({parameter.name, run.global.begin}, cut).first->second == cut;
      }
    }
  }
}

// Whether each data rank owns the same part of all copies that the ranks of its replica hold.
bool cuts_copies_alike(const Config& config, const Topology& topology) {
  CopyCuts cuts;
  bool alike = true;
  for (int rank = 0; rank < topology.tensor && alike; ++rank) {
    TrafficTable ignored;
    add_copy_cuts(MetaRank(config, topology, rank, &ignored).state, cuts, alike);
  }
  return alike;
}

}  // namespace

Topology training_topology(const Config& config, const ReplicaPlan& plan) {
  Topology topology = topology_of(plan);
  // Sums in fixed order and of two terms are equal wherever they are made.
  if (config.numerics.reduction == Reduction::kInvariant || topology.data <= 2 || topology.tensor == 1 ||
      !topology.uniform()) {
    return topology;
  }
  if (cuts_copies_alike(config, topology)) return topology;
  topology.widths = plan.widths;
  topology.samples = plan.samples;
  return topology;
}

MemorySizes measure_memory(const Config& config, const Topology& topology, int world_rank, DeviceType target,
                           TrafficTable* traffic) {
  TrafficTable ignored;
  MetaRank rank(config, topology, world_rank, traffic != nullptr ? traffic : &ignored, target);
  rank.state.dry_run();
  return rank.state.used();
}

ParameterCounts count_parameters(const Config& config) {
  Config alone = config;
  alone.parallel.tensor = 1;
  alone.numerics.reduction = Reduction::kFast;  // whose workers the batch of one rank might not have
  TrafficTable ignored;
  const MetaRank rank(alone, Topology{}, 0, &ignored);
  ParameterCounts counts;
  for (const Weight& weight : rank.state.parameters().weights()) {
    for (const Parameter& parameter : weight.parameters) {
      (parameter.trained ? counts.trained : counts.constant) += parameter.numel();
    }
  }
  return counts;
}

std::vector<StateTensor> checkpoint_tensors(const ModelConfig& model) {
  Config config;
  config.model = model;
  config.train.sequence_length = 1;  // built to name its parameters, not to run
  TrafficTable ignored;
  const MetaRank rank(config, Topology{}, 0, &ignored);
  std::vector<StateTensor> tensors;
  for (const Weight& weight : rank.state.parameters().weights()) {
    for (const Parameter& parameter : weight.parameters) {
      tensors.emplace_back("model", parameter);
      tensors.back().transposed = false;
    }
  }
  return tensors;
}

void check_hf_weights(const Config& config, const Topology& topology, int world_rank, const HfWeights& weights) {
  TrafficTable ignored;
  const MetaRank rank(config, topology, world_rank, &ignored);
  load_hf_weights(rank.state.parameters(), rank.stream, weights);
}

}  // namespace invar
