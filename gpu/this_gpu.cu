// gpu/this_gpu.cu - whether this machine's GPU can run a setup, and in how much of its memory: make_gpu() and
// why_no_gpu() of model.h.
#include <algorithm>
#include <cstdlib>

#include "plan.h"
#include "../program/ranks.h"
#include "cuda.h"

namespace coat {
namespace {

using namespace gpu;

// CUDA can load it on the GPUs for which the program's kernels were compiled, and on no others.
__global__ void empty_kernel() {}

int capability() {
    return 10 * device_attribute(cudaDevAttrComputeCapabilityMajor, 9) +
           device_attribute(cudaDevAttrComputeCapabilityMinor, 0);
}

std::string why_no_kernels() {
    cudaFuncAttributes unused;
    const cudaError_t error = cudaFuncGetAttributes(&unused, empty_kernel);
    cudaGetLastError();
    if (error == cudaSuccess) return "";
    if (error != cudaErrorNoKernelImageForDevice && error != cudaErrorInvalidDeviceFunction)
        return concat("the GPU does not start: ", cudaGetErrorString(error));
    return concat("this program was built for other GPUs than this one, of compute capability ",
                  capability() / 10, ".", capability() % 10, ": rebuild with make GPU_ARCH=", capability(),
                  capability() >= 90 ? "a" : "");
}

// FP8 weights are cached only if they fit.
std::unique_ptr<Model> model_that_fits(const Setup& s) {
    constexpr int64_t LOADED_LATER = 256 << 20;  // that CUDA and cuBLAS take when kernels are first launched
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "Asking for the GPU's memory failed");
    int64_t needed = 0;
    for (const bool cached : {caches_weights(s), false}) {
        const int64_t bytes = arena_bytes(s, cached);
        needed = bytes + LOADED_LATER + page_tables(s.ranks, bytes);
        if (needed <= static_cast<int64_t>(free)) return gpu_model(s, bytes, cached);
    }
    throw Error("This run needs ", gigabytes(needed), " GB of GPU memory, but ",
                gigabytes(static_cast<int64_t>(free)), " GB are free; ",
                "choose a smaller --batch, --seq or --model, or save memory with --master none",
                s.ranks > 1 ? " and --attention groups."
                            : ", --attention groups, and --gradients none with --clip 0.");
}

}  // namespace
}  // namespace coat

std::string coat::why_no_gpu(int gpu) {
    int gpus = 0;
    const cudaError_t error = cudaGetDeviceCount(&gpus);
    cudaGetLastError();  // clear it: nothing has failed
    if (error != cudaSuccess)
        return concat("CUDA does not start: ", cudaGetErrorString(error),
                      "; nvidia-smi must show a GPU and CUDA ", CUDART_VERSION / 1000,
                      " or newer, else install a newer driver");
    cudaSetDevice(std::min(gpu, gpus - 1));  // another would get a context, too
    if (capability() < 80) return "this GPU is too old: BF16 needs compute capability 8.0 (Ampere) or newer";
    return why_no_kernels();
}

int coat::gpu_capability() { return capability(); }

std::unique_ptr<coat::Model> coat::make_gpu(const Setup& setup) {
    int local = setup.processes ? setup.processes->local() : 0;  // number of the GPU
    const std::string missing = why_no_gpu(local);
    if (!missing.empty()) throw Error("--device gpu cannot be used: " + missing + ".");
    if (std::getenv("COAT_SHARE_GPU")) local = 0;  // slow: for tests of several ranks on one GPU
    gpu::check(cudaSetDevice(local),
               concat("Choosing GPU number ", local, " failed; each rank needs a GPU of its own").c_str());
    for (int theirs : setup.processes ? setup.processes->all_gather(capability()) : std::vector<int>())
        if (theirs != capability())
            throw Error("The GPUs of the ranks differ in compute capability; use GPUs of one kind.");
    Setup s = setup;
    s.recipe = recipe_on_gpu(setup.recipe, capability());
    return model_that_fits(s);
}
