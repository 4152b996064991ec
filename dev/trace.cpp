// trace.cpp - a library that prints which kernels ran in the last steps of ./train, and when the GPU was
// idle.
//
//   make build/libtrace.so
//   CUDA_INJECTION64_PATH=build/libtrace.so ./train --steps 6 --eval-every 0 --sample-every 0 --out ""
//
// CUDA loads the library that CUDA_INJECTION64_PATH names. bench.cu times every operator by itself; this
// shows the real step, with its clock, cache and waiting. CUPTI records the start and the end of every
// kernel, copy and memset. A step ends with the first copy to the host after an AdamW kernel, which is when
// the program reads the loss. COAT_TRACE_STEPS is the number of steps to show, counted from the one before the
// last (default 3).
#include <cupti.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

struct Work {
    uint64_t begin, end;  // ns
    const std::string* name;
};
std::mutex guard;
std::map<std::string, std::string> names;  // mangled name -> readable name
std::vector<Work> all;
const char *const TO_HOST = "copy to the host", *const TO_GPU = "copy to another GPU", *const ADAMW = "adamw_kernel";

void must(CUptiResult result, const char* what) {
    if (result == CUPTI_SUCCESS) return;
    const char* text = "";
    cuptiGetResultString(result, &text);
    std::fprintf(stderr, "trace: %s: %s.\n", what, text);
    std::_Exit(1);  // works also while the program exits
}

// Removes return type, namespaces and arguments, but keeps template arguments.
std::string readable(const std::string& mangled) {
    int failed = 0;
    const std::unique_ptr<char, void (*)(void*)> text(
        abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &failed), std::free);
    std::string name = failed ? mangled : text.get();
    for (const char* noise : {"void ", "(anonymous namespace)::", "sm90::", "coat::", "gpu::", "__nv_"})
        for (size_t at; (at = name.find(noise)) != std::string::npos;)
            name.erase(at, std::string(noise).size());
    int depth = 0;
    for (size_t i = 0; i < name.size(); i++) {
        depth += (name[i] == '<') - (name[i] == '>');
        if (name[i] == '(' && depth == 0) name.resize(i);
    }
    return name.size() > 92 ? name.substr(0, 90) + ".." : name;
}

void note(uint64_t begin, uint64_t end, const std::string& name) {
    const auto known = names.find(name);
    all.push_back(
        {begin, end, &(known != names.end() ? known : names.emplace(name, readable(name)).first)->second});
}

void CUPTIAPI give_buffer(uint8_t** buffer, size_t* size, size_t* most_records) {
    *size = 8 << 20, *most_records = 0;
    *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, *size));
}

void CUPTIAPI take_buffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
    const std::lock_guard<std::mutex> lock(guard);
    for (CUpti_Activity* record = nullptr;
         cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS;) {
        if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
            const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel10*>(record);
            note(kernel->start, kernel->end, kernel->name);
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
            const auto* copy = reinterpret_cast<const CUpti_ActivityMemcpy6*>(record);
            const bool from_host = copy->copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_HTOD;
            note(copy->start, copy->end,
                 copy->copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOH ? TO_HOST
                 : copy->copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_PTOP ? TO_GPU
                 : from_host                                       ? "copy from the host"
                                                                   : "copy");
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY2) {
            const auto* copy = reinterpret_cast<const CUpti_ActivityMemcpyPtoP4*>(record);
            note(copy->start, copy->end, TO_GPU);
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
            const auto* memset = reinterpret_cast<const CUpti_ActivityMemset4*>(record);
            note(memset->start, memset->end, "memset");
        }
    }
    std::free(buffer);
}

struct Sum {
    int64_t count = 0;
    double ns = 0;
    void add(double more) { count++, ns += more; }
};
template <class Key>
std::vector<std::pair<Key, Sum>> largest_first(const std::map<Key, Sum>& sums) {
    std::vector<std::pair<Key, Sum>> sorted(sums.begin(), sums.end());
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const auto& a, const auto& b) { return a.second.ns > b.second.ns; });
    return sorted;
}

// Prints how long this GPU sent to others, and how much of that time a kernel ran beside it.
void report_sending(size_t first, size_t last, double steps) {
    Sum sent;
    double hidden = 0;
    for (size_t i = first; i < last; i++) {
        if (*all[i].name != TO_GPU) continue;
        sent.add(static_cast<double>(all[i].end - all[i].begin));
        uint64_t counted = all[i].begin;  // what lies before it is counted, if a kernel ran
        // Work is sorted by its beginning; no kernel of ours takes as long as 2000 others.
        for (size_t j = i > first + 2000 ? i - 2000 : first; j < last && all[j].begin < all[i].end; j++) {
            const std::string& name = *all[j].name;
            if (name.compare(0, 4, "copy") == 0 || name == "memset" || all[j].end <= counted) continue;
            const uint64_t end = std::min(all[j].end, all[i].end);
            hidden += static_cast<double>(end - std::max(all[j].begin, counted));
            counted = end;
        }
    }
    if (sent.count)
        std::printf("sending to other GPUs: %.2f ms a step, %.1f%% of it while a kernel ran\n",
                    sent.ns / steps * 1e-6, 100 * hidden / sent.ns);
}

void report() {
    must(cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "Collecting what the GPU did failed");
    std::stable_sort(all.begin(), all.end(), [](const Work& a, const Work& b) { return a.begin < b.begin; });
    std::vector<size_t> ends;  // index after the last work of each step
    bool updated = false;
    for (size_t i = 0; i < all.size(); i++) {
        updated |= all[i].name->compare(0, std::string(ADAMW).size(), ADAMW) == 0;
        if (updated && *all[i].name == TO_HOST) ends.push_back(i + 1), updated = false;
    }
    const char* wanted = std::getenv("COAT_TRACE_STEPS");
    const size_t steps = wanted ? std::strtoul(wanted, nullptr, 10) : 3;
    // The first step also selects GEMM algorithms. What follows the last step (validation) looks like a part
    // of it.
    if (steps == 0 || ends.size() <= steps + 2) {
        std::fprintf(stderr,
                     "trace: only %zu steps were recorded; run more steps, or lower COAT_TRACE_STEPS.\n",
                     ends.size());
        return;
    }
    const size_t first = ends[ends.size() - 2 - steps], last = ends[ends.size() - 2];
    std::map<std::string, Sum> kernels;
    std::map<std::pair<std::string, std::string>, Sum> gaps;  // by the kernels before and after
    Sum idle;
    uint64_t done = all[first - 1].end;
    for (size_t i = first; i < last; i++) {
        const Work& w = all[i];
        kernels[*w.name].add(static_cast<double>(w.end - w.begin));
        if (w.begin > done) {
            const double gap = static_cast<double>(w.begin - done);
            idle.add(gap);
            gaps[{*all[i - 1].name, *w.name}].add(gap);
        }
        done = std::max(done, w.end);
    }
    const double n = static_cast<double>(steps), whole = static_cast<double>(done - all[first - 1].end);
    std::printf(
        "\ntrace of %zu steps before the last: %.2f ms a step, of which the GPU was idle %.2f ms in %.0f gaps\n",
        steps, whole / n * 1e-6, idle.ns / n * 1e-6, static_cast<double>(idle.count) / n);
    report_sending(first, last, n);
    auto row = [&](const Sum& s, const std::string& name) {
        std::printf("%8.1f %10.1f %10.3f %6.2f%%  %s\n", static_cast<double>(s.count) / n,
                    s.ns / static_cast<double>(s.count) * 1e-3, s.ns / n * 1e-6, 100 * s.ns / whole,
                    name.c_str());
    };
    std::printf("%8s %10s %10s %7s  %s\n", "a step", "us each", "ms a step", "of it", "kernel");
    Sum rest;
    for (const auto& [name, sum] : largest_first(kernels)) {
        if (sum.ns >= whole * 5e-4) row(sum, name);
        else rest.count += sum.count, rest.ns += sum.ns;
    }
    if (rest.count) row(rest, "(all others)");
    std::printf("%8s %10s %10s %7s  %s\n", "a step", "us each", "ms a step", "of it", "idle between");
    int shown = 0;
    for (const auto& [around, sum] : largest_first(gaps))
        if (shown++ < 8) row(sum, around.first.substr(0, 44) + "  ->  " + around.second.substr(0, 44));
}

}  // namespace

// CUDA calls this function in the library that CUDA_INJECTION64_PATH names.
extern "C" int InitializeInjection() {
    must(cuptiActivityRegisterCallbacks(give_buffer, take_buffer), "Starting to trace failed");
    for (auto kind :
         {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMCPY2,
          CUPTI_ACTIVITY_KIND_MEMSET})
        must(cuptiActivityEnable(kind), "Starting to trace failed");
    std::atexit(report);
    return 1;
}
