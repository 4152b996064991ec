// gpu/context.cpp - waiting and copying (gpu/context.h).
#include "context.h"

#include "../common/ranks.h"

namespace coat::gpu {

void GpuContext::wait(const char* what) const {
    enqueue(stream, "wait", [&] {
        if (settings.communicator)
            settings.communicator->wait_until([&] { return cudaStreamQuery(stream) != cudaErrorNotReady; });
        check(cudaStreamSynchronize(stream), what);
    });
}
void GpuContext::wait_then_start_copy_to_gpu(void* to_gpu, const void* from_host, int64_t bytes) const {
    wait();
    copy_async(to_gpu, from_host, bytes, stream);
}
void GpuContext::copy_to_host(void* to_host, const void* from_gpu, int64_t bytes) const {
    wait();
    copy_async(to_host, from_gpu, bytes, stream);
    wait();
}

}  // namespace coat::gpu
