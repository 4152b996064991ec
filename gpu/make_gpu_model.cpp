// gpu/make_gpu_model.cpp - whether this machine's GPU can run a model, and in how much of its memory
// (gpu/gpu_model.h). A program that is built without nvcc has gpu/no_cuda.cpp in its place.
#include <cstdlib>

#include "cuda.h"
#include "extra_buffers.h"
#include "gpu_model.h"
#include "transport.h"

namespace coat {

using namespace gpu;

bool built_with_cuda() { return true; }

int gpu_capability() {
    return 10 * device_attribute(cudaDevAttrComputeCapabilityMajor, 9) +
           device_attribute(cudaDevAttrComputeCapabilityMinor, 0);
}

// Why this GPU does not run the program's kernels, which are compiled for one kind of GPU; empty if it does.
static std::string why_no_kernels() {
    const cudaError_t error = kernel_status();
    if (error == cudaSuccess) return "";
    if (error != cudaErrorNoKernelImageForDevice && error != cudaErrorInvalidDeviceFunction)
        return concat("the GPU does not start: ", cudaGetErrorString(error));
    const int capability = gpu_capability();
    return concat("this program was built for other GPUs than this one, of compute capability ",
                  capability / 10, ".", capability % 10, ": rebuild with make GPU_ARCH=", capability,
                  capability >= 90 ? "a" : "");
}

std::string select_gpu(int gpu) {
    int gpus = 0;
    const cudaError_t error = cudaGetDeviceCount(&gpus);
    cudaGetLastError();  // clears the error: nothing has failed
    if (error != cudaSuccess)
        return concat("CUDA does not start: ", cudaGetErrorString(error),
                      "; nvidia-smi must show a GPU and CUDA ", CUDART_VERSION / 1000,
                      " or newer, else install a newer driver");
    cudaSetDevice(std::min(gpu, gpus - 1));  // otherwise GPU 0 would get a context, too
    if (gpu_capability() < 80)
        return "this GPU is too old: BF16 needs compute capability 8.0 (Ampere) or newer";
    return why_no_kernels();
}

// The model, with cached FP8 weights if they fit; or an Error if there is too little memory. A dry run has
// found out what each of the two needs. The GPUs are connected already, so NCCL's memory is no longer free.
static std::unique_ptr<Model> model_that_fits(const RunSettings& s, std::shared_ptr<Transport> transport) {
    // The bytes that CUDA and cuBLAS allocate when kernels are first launched.
    constexpr int64_t LOADED_LATER = 256 << 20;
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "Asking for the GPU's memory failed");
    int64_t needed = 0;
    for (const bool cached : {should_cache_weights(s), false}) {
        const int64_t bytes = arena_bytes(s, cached);
        needed = bytes + LOADED_LATER + page_table_bytes(s.ranks, bytes);
        if (needed <= int64_t(free)) return make_gpu_model_of_size(s, bytes, cached, std::move(transport));
    }
    const std::string flags = flags_that_save_memory(s);
    throw Error("This run needs ", gigabytes(needed), " GB of GPU memory, but ", gigabytes(int64_t(free)),
                " GB are free; choose a smaller --batch, --seq or --model",
                flags.empty() ? "." : ", or flags that save memory: " + flags + ".");
}

std::unique_ptr<Model> make_gpu_model(const RunSettings& settings) {
    int gpu = settings.communicator ? settings.communicator->local_rank() : 0;  // the number of the GPU
    const std::string missing = select_gpu(gpu);
    if (!missing.empty()) throw Error("--device gpu cannot be used: ", missing, ".");
    if (std::getenv("COAT_SHARE_GPU")) gpu = 0;  // slow: for tests of several ranks on one GPU
    check(cudaSetDevice(gpu),
          concat("Choosing GPU number ", gpu, " failed; each rank needs a GPU of its own").c_str());
    const int capability = gpu_capability();
    if (settings.communicator)
        for (const int theirs : settings.communicator->all_gather(capability))
            if (theirs != capability)
                throw Error("The GPUs of the ranks differ in compute capability; use GPUs of one kind.");
    RunSettings s = settings;
    s.recipe = recipe_on_gpu(settings.recipe, capability);
    return model_that_fits(s, connect_gpus(s));
}

}  // namespace coat
