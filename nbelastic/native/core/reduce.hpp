// How values of several ranks become one: loops over memory, for the processor at hand.
//
// Values are added in the order of the inputs, so the same inputs give the same bits, whoever adds.
// 16-bit floating point is added in 32 bits and rounded once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nbelastic {

enum class Type : std::uint32_t { f32, f64, f16, bf16, i8, i32, i64, u8 };
enum class Op : std::uint32_t { sum, average, min, max, product };
inline constexpr std::uint32_t kTypes = 8;
inline constexpr std::uint32_t kOps = 5;

// By torch's names.
inline constexpr const char* kTypeNames[kTypes] = {"float32", "float64", "float16", "bfloat16",
                                                   "int8",    "int32",   "int64",   "uint8"};
inline constexpr const char* kOpNames[kOps] = {"sum", "average", "min", "max", "product"};

constexpr std::size_t bytes_of(Type type) {
    constexpr std::size_t sizes[kTypes] = {4, 8, 2, 2, 1, 4, 8, 1};
    return sizes[static_cast<std::uint32_t>(type)];
}

// Reduces `inputs`, each of `count` values, and writes the outcome to each of `outputs`, which may
// be inputs. An average is the sum divided by `divisor`. Null where a type has no such reduction.
using Reduce = void (*)(std::byte* const* outputs, std::size_t n_outputs,
                        const std::byte* const* inputs, std::size_t n_inputs, std::size_t count,
                        double divisor);

// Adds `inputs` along a tree, each sum rounded to the type: after each input as many additions as
// the order says (see tree.hpp). Writes the result to each of `outputs`, which may be inputs, or
// each of several results to one output. `room` has kTreeBlock bytes for each value on the stack,
// at most kDeepest, and begins on a cache line.
using ReduceTree = void (*)(std::byte* const* outputs, std::size_t n_outputs,
                            const std::byte* const* inputs, const std::uint8_t* order,
                            std::size_t n_inputs, std::size_t n_results, std::size_t count,
                            std::byte* room);

inline constexpr std::size_t kTreeBlock = 1 << 10;
inline constexpr std::uint32_t kDeepest = 64;  // enough for 2^32 leaves, whatever the blocks
inline constexpr std::size_t kMostOutputs = 256;

struct Kernels {
    const char* name;
    Reduce of[kTypes][kOps];
    ReduceTree along_tree[kTypes];
};

// The best for this processor.
const Kernels& kernels() noexcept;

// All there are; other processors than x86-64 have the first only.
const Kernels* kernels_baseline() noexcept;
const Kernels* kernels_avx2() noexcept;
const Kernels* kernels_avx512() noexcept;

}  // namespace nbelastic
