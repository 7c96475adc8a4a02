#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>

#include "config/config.h"
#include "core/error.h"

namespace invar {

// The vocabulary of validation. Each throws Error{kConfig}. The message begins with the place of the first of the named
// keys that was given; if none was, with the file that their section comes from, or else with the config file.

[[noreturn]] void refuse(const Config& config, std::initializer_list<std::string_view> keys, const std::string& message,
                         const std::string& hint);

// The key has another value than its default, and `where` ("with data.kind: mock") it would be ignored.
void refuse_if_set(const Config& config, std::string_view key, const std::string& where);

// The key has no default and was not given.
void check_required(const Config& config, std::string_view key);

// at_least <= value <= at_most
void check_count(const Config& config, std::string_view key, int64_t value, int64_t at_least,
                 int64_t at_most = std::numeric_limits<int32_t>::max());

// The type that a number is computed with: the rules below hold for the number as that type, and it is finite there.
enum class UsedAs : uint8_t { kF32, kF64 };

void check_positive(const Config& config, std::string_view key, double value, UsedAs type = UsedAs::kF32);
void check_not_negative(const Config& config, std::string_view key, double value, UsedAs type = UsedAs::kF32);
// 0 <= value < 1
void check_fraction(const Config& config, std::string_view key, double value, UsedAs type = UsedAs::kF32);

}  // namespace invar
