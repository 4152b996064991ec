// judge.h - the types of exercises, the functions of `given`, and the judges. A judge calls the reader's
// function, prints "passed" or a value that differs, with HINT=1 also a hint, and returns the exit code. To
// solve an exercise, nobody needs to read how it is judged.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <vector>

#include "../../reference/operators.h"
#include "../../reference/optimizer.h"

#pragma GCC diagnostic ignored "-Wunused-parameter"  // of empty bodies

struct Fp8 {  // an 8-bit floating-point format
    int mantissa, bias;
    float max;  // the largest finite value
};
inline constexpr Fp8 E4M3{3, 7, 448.0f}, E5M2{2, 15, 57344.0f};

struct Matrix {  // row-major: element (r, c) is values[r * cols + c]
    int rows, cols;
    std::vector<float> values;
};

struct Fp8Matrix {  // row-major codes of a format that share one scale: a value is scale * decode(code)
    int rows, cols;
    Fp8 format;
    float scale;
    std::vector<uint8_t> codes;
};

struct Moment {  // E4M3 codes; max and k of each moment group, which is 128 parameters
    uint8_t* codes;
    float *max, *k;
};

struct Step {  // what a step of AdamW has beside its tensors; bias1 = 1 - beta1^t, bias2 = 1 - beta2^t
    float lr, beta1, beta2, eps, decay, bias1, bias2;
};

namespace given {  // functions of earlier exercises, for E4M3, to use in later ones

using namespace coat;
constexpr Format F8 = Format::E4M3;
inline uint8_t encode(float x) { return uint8_t(reference::encode(F8, x)); }
inline float decode(uint8_t code) { return reference::decode(F8, code); }
inline float to_bf16(float x) { return reference::round_to(Format::BF16, x); }  // to the nearest
inline float expansion_exponent(float max, float min) { return reference::expansion_exponent(F8, max, min); }
inline float expand(float x, float max, float k) { return reference::expand(F8, x, max, k); }
inline float contract(float y, float max, float k) { return reference::contract(F8, y, max, k); }

Fp8Matrix quantize(const Fp8& f, const Matrix& x);  // with one scale for the tensor
float decode(const Fp8& f, uint8_t code);
Fp8Matrix transposed(const Fp8Matrix& x);

// x encoded and decoded again, so that the scales are in the values: in E4M3 with one scale, in E5M2 with one
// scale, in E4M3 with a scale for each block
Matrix quantized(const Matrix& x);
Matrix quantized_e5m2(const Matrix& x);
Matrix quantized(const Matrix& x, int block_rows, int block_cols);
Matrix transposed(const Matrix& x);
Matrix product(const Matrix& a, const Matrix& b);  // a b

}  // namespace given

namespace judge {

inline std::string failure;  // why a call could not compute anything: then nothing is compared
inline bool hint_wanted = std::getenv("HINT") != nullptr;  // make exercise N=3 HINT=1

template <class F> using Function = std::function<F>;
using Expand = float(float, float, float);
using AdamW = void(const Step&, int, const float*, float*, Moment, Moment);
using Gemm = Matrix(const Fp8Matrix&, const Fp8Matrix&);
using Linear = void(const Matrix&, const Matrix&, const Matrix&, Matrix&, Matrix&, Matrix&);
using Norm = void(int, int, const uint8_t*, const float*, const float*, const float*, float*, float*);
using SwiGLU = void(int, int, const uint8_t*, const float*, const float*, float*);
using Transpose = void(int, int, float, const float*, uint8_t*, uint8_t*);
struct Choice {  // how a tensor is stored
    const Fp8* format;
    bool groups;  // a scale for each 1x16 group; else one for the tensor
};
enum class SavedAs { UNKNOWN, NO, BF16, GROUPS };
enum class OperandIn { UNKNOWN, NO, E4M3, E5M2 };
struct Use {  // of a tensor of a layer
    SavedAs saved;
    OperandIn operand;
};

int decode(const Function<float(const Fp8&, uint8_t)>&);
int quantize_tensor(const Function<float(int, const float*, uint8_t*)>&);
int quantize_to_groups(const Function<void(int, int, const float*, uint8_t*, float*)>&);
int amax(const Function<float(int, const float*, float*)>&);
int encode(const Function<uint8_t(const Fp8&, float)>&);
int expansion(const Function<float(float, float)>& expansion_exponent, const Function<Expand>& expand,
              const Function<Expand>& contract);
// On the CPU (exercises 7 and 17) a call has one moment group; on a GPU (14) it has all.
int adamw(const Function<AdamW>&, int number = 7);
int linear(const Function<Gemm>& gemm, const Function<Linear>&);
int linear_in_blocks(const Function<Linear>&);
int norm_backward(const Function<Norm>&);
int swiglu_backward(const Function<SwiGLU>&);
int quantize_transpose(const Function<Transpose>&);
int choose(const Choice (&choices)[6]);
int saved(const Use (&uses)[7]);

}  // namespace judge
