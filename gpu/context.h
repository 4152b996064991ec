// gpu/context.h - what all GPU code of the host is given: settings, parameters, stream and arena.
#pragma once
#include "../common/ranks.h"
#include "arena.h"

namespace coat::gpu {

// This rank's GPU: the settings of the run, the table of its parameters (common/architecture.h), the stream
// of the computation, and the one allocation of memory.
struct GpuContext {
    const RunSettings settings;
    const std::vector<Param> params = parameters(settings.config);
    const Stream stream;
    Arena arena;

    // bytes: the size of the allocation, or DRY_RUN_BYTES. In a dry run the stream is DRY_RUN.
    GpuContext(const RunSettings& s, int64_t bytes)
        : settings(s), stream(/*dry_run=*/bytes == DRY_RUN_BYTES), arena(bytes) {}

    // Waits until the stream has run all that was put on it. what: how the Error begins if something has
    // failed. (With several ranks: if another rank has ended, this process ends too.)
    void wait(const char* what = "The GPU failed") const {
        unless_dry_run(stream, "wait", [&] {
            if (settings.communicator)
                settings.communicator->wait_until(
                    [&] { return cudaStreamQuery(stream) != cudaErrorNotReady; });
            check(cudaStreamSynchronize(stream), what);
        });
    }
    // Copies between the host and this GPU. Both functions first call wait(). wait_then_start_copy_to_gpu()
    // then starts its copy, so what it reads must stay until the next wait(). copy_to_host() returns when its
    // copy is complete.
    //
    // (Why they wait: CUDA itself may wait for the stream before it copies memory of the host, and would wait
    // for ever if another rank has ended. wait() notices that.)
    void wait_then_start_copy_to_gpu(void* to_gpu, const void* from_host, int64_t bytes) const {
        wait();
        copy_async(to_gpu, from_host, bytes, stream);
    }
    void copy_to_host(void* to_host, const void* from_gpu, int64_t bytes) const {
        wait();
        copy_async(to_host, from_gpu, bytes, stream);
        wait();
    }

    // (This can wait.) What quantization has lost so far, while it is measured. Otherwise both pointers are
    // null.
    QuantStats* quant_stats = nullptr;    // on the device, by MeasuredKind, of all but moments
    QuantReport* quant_report = nullptr;  // on the host: of moments
    QuantStats* quant_stats_of(MeasuredKind kind) const {
        return quant_stats ? quant_stats + int(kind) : nullptr;
    }
};

}  // namespace coat::gpu
