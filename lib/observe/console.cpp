#include "observe/console.h"

#include <array>
#include <cmath>
#include <string>

#include "core/format.h"

namespace invar {

namespace {

// A number in exactly width (≥ 5) characters, with as many decimals as fit: 5.541, 11.93, 1193., 1e+05, nan.
std::string fit(double value, int width) {
  if (std::isfinite(value)) {
    for (int decimals = width - 2; decimals >= 0; --decimals) {
      const std::string text = format("{:#.{}f}", value, decimals);
      if (static_cast<int>(text.size()) <= width) return format("{:>{}}", text, width);
    }
    return format("{:>{}.0e}", value, width);
  }
  return format("{:>{}}", format("{}", value), width);
}

// Five characters: "  987", "12.3k", " 123k", "1.23M".
std::string with_suffix(double value) {
  if (!std::isfinite(value)) return format("{:>5}", value);
  constexpr std::array<const char*, 5> kSuffixes{"", "k", "M", "G", "T"};
  size_t scale = 0;
  while (value >= 999.5 && scale + 1 < kSuffixes.size()) {
    value /= 1000;
    ++scale;
  }
  const int decimals = scale == 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return format("{:>5}", format("{:.{}f}{}", value, decimals, kSuffixes[scale]));
}

// Seven characters: " 1.5 ms", "  45 ms", "9876 ms", "12.35 s".
std::string duration(double ms) {
  if (ms < 9.95) return format("{:>4.1f} ms", ms);
  if (ms < 9999.5) return format("{:>4.0f} ms", ms);
  return format("{} s", fit(ms / 1000, 5));
}

std::string clock(double seconds) {
  if (!(seconds >= 0) || !std::isfinite(seconds)) return "-:--:--";
  const auto total = static_cast<int64_t>(std::llround(seconds));
  return format("{}:{:02}:{:02}", total / 3600, total / 60 % 60, total % 60);
}

std::string progress(int64_t step, int64_t total) {
  return format("step {:>{}}/{}", step, std::to_string(total).size(), total);
}

}  // namespace

std::string console_line(const StepMetrics& metrics, double seconds_left) {
  return format("{} | loss {} | grad norm {} | lr {:.2e} | {} tok/s | {} | left {}",
                progress(metrics.step, metrics.steps_total), metrics.loss ? fit(*metrics.loss, 6) : "  none",
                fit(metrics.grad_norm, 5), metrics.lr, with_suffix(metrics.tokens_per_s), duration(metrics.step_ms),
                clock(seconds_left));
}

std::string console_line(const EvaluationMetrics& metrics) {
  const std::string step = progress(metrics.step, metrics.steps_total);
  if (!metrics.validation_loss) {
    return format("{} | no validation loss: of {} samples no token counts", step, metrics.samples);
  }
  return format("{} | validation loss {} | perplexity {} | {} samples", step, fit(*metrics.validation_loss, 6),
                fit(metrics.perplexity(), 5), metrics.samples);
}

}  // namespace invar
