// exercises_gpu.cu - exercises 13 and 14 on a GPU: what the judge says of an empty kernel, of typical mistakes
// (14 has the judge of 7, exercises.cpp), and of a solution; and, without a GPU, that it says so in a sentence.
// exercises_on_cpu.cpp has the same without nvcc.
#include "../help/exercises.h"
#include "../help/gpu.h"
#include "exercise_kernels.cuh"

namespace e13 {
#include "../../dev/exercises/13-quantize-transpose.cu"
}
namespace e14 {
#include "../../dev/exercises/14-adamw.cu"
}

using namespace coat::test;

TEST_CASE("exercises 13 and 14: without a GPU the judge says so" * doctest::skip(gpu_available())) {
    transposes("exercise 13: there is no GPU here that CUDA can use.", e13::quantize_transpose);
    updates("exercise 14: there is no GPU here that CUDA can use.", e14::adamw);
}

GPU_TEST_CASE("exercises 13 and 14: an empty kernel and typical mistakes and a solution") {
    judge_kernels(e13::quantize_transpose, e14::adamw);
}
