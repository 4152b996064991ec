// gpu/no_cuda.cpp - stands for gpu/make_gpu_model.cpp and model.cu in a program that is built without nvcc.
#include "gpu_model.h"

namespace coat {

std::string select_gpu(int) {
    return "this program was built without CUDA; install the CUDA toolkit (nvcc) and run make again";
}
bool built_with_cuda() { return false; }
int gpu_capability() { return 0; }
std::unique_ptr<Model> make_gpu_model(const RunSettings&) { throw Error(select_gpu(), "."); }
int64_t arena_bytes(const RunSettings&, bool) { return 0; }

}  // namespace coat
