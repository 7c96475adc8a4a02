#include "parallel/check_plan.h"

#include "comm/thread_communicator.h"
#include "support/rank_checks.h"

using namespace invar;

TEST_CASE("ranks with one plan go on, others are named on every rank") {
  Config config;
  config.parallel.tensor = 4;
  config.parallel.nonuniform.tensor_widths = {4, 3};
  config.model.num_attention_heads = config.model.num_key_value_heads = 4;
  config.model.hidden_size = config.model.intermediate_size = config.model.vocab_size = 64;
  config.model.num_hidden_layers = 1;
  config.model.head_dim = 16;
  config.train.sequence_length = 8;
  config.train.global_batch_size = 8;
  for (const int other : {-1, 0, 2, 6}) {
    run_thread_ranks(7, [&](Communicator& world) {
      Config own = config;
      if (world.rank() == other) own.train.global_batch_size = 9;
      std::string message;
      try {
        check_plan(plan_replicas(own, 7), world);
      } catch (const Error& error) {
        message = error.what();
      }
      const std::string expected =
          other < 0 ? "" : format("rank {} plans other replicas than rank 0", other == 0 ? 1 : other);
      CHECK(message == expected);
    });
  }
}
