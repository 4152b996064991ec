// ladder.h - what the programs around the rungs share, which a reader of the rungs can skip: random data, and
// the table that a program prints. Device memory and the clock are in gpu_tools.h. What one ladder's kernels
// are given, and how they are compared with the CPU reference, is in its own header, such as adamw_data.h.
#pragma once
#include <cuda_bf16.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "../../common/random.h"
#include "../../reference/rounding.h"
#include "../gpu_tools.h"

namespace ladder {

using namespace coat;
using dev::Buffer;
using bf16 = __nv_bfloat16;

inline std::vector<uint16_t> random_bf16(size_t n, float std, uint64_t seed = 1) {
    std::vector<uint16_t> x(n);
    for (size_t i = 0; i < n; i++) x[i] = reference::to_bf16(random_weight(seed, 0, i, std));
    return x;
}

// Copy bandwidth within the device in bytes per second, reads plus writes.
inline double copy_rate() {
    Buffer<uint8_t> from(1 << 30), to(1 << 30);
    const double seconds = dev::median_seconds([&] {
        gpu::check(cudaMemcpyAsync(to.get(), from.get(), from.size, cudaMemcpyDeviceToDevice),
                   "Copying failed");
    });
    return 2 * double(from.size) / seconds;
}

// What a comparison with the CPU reference says of a rung.
struct Verdict {
    bool right = true;
    bool written = true;  // false: the kernel has written nothing, because the reader has not written it yet
    std::string text{};   // for the last column of the table
};

// A row of the table. launch(arguments) starts the kernels of a rung, and waits for nothing. AS_IN_TRAINING:
// the data of the ladder launch the kernels that train, which need more than a rung is given.
template <class... Arguments> struct RungOf {
    const char* name;
    std::function<void(Arguments...)> launch;
};
constexpr std::nullptr_t AS_IN_TRAINING = nullptr;

// The time that a rung could take at best, and what it is compared with.
struct Limit {
    double seconds;
    std::string text;    // a line above the table
    const char* column;  // of the table: 9 letters
};
inline Limit copying(double bytes) {
    const double rate = copy_rate();
    char text[100];
    snprintf(text, sizeof(text), "%.2f GB at the copy bandwidth of %.2f TB/s: %.0f us", bytes * 1e-9,
             rate * 1e-12, 1e6 * bytes / rate);
    return {.seconds = bytes / rate, .text = text, .column = "% of copy"};
}

// Checks and times the rungs of a ladder, and prints a row of the table for each:
//   check   check(rung) compares it with the CPU reference, on little data: a Verdict
//   run     run(rung) launches it on large data, as often as it is called
// A rung that is wrong is named, and the next one follows. With numbers as arguments of the program only
// these rungs run, for instance under a profiler. Returns what main() returns: 1 if a rung is wrong.
template <class Rung, class Check, class Run>
int climb(const std::vector<Rung>& rungs, const Limit& limit, int argc, char** argv, Check check, Run run) {
    printf("%s\n\n", limit.text.c_str());
    printf("%-64sus  %s  speed-up  codes\n", "rung", limit.column);
    bool wrong = false;
    double previous = 0;
    for (int i = 0; i < int(rungs.size()); i++) {
        bool wanted = argc == 1;
        for (int a = 1; a < argc; a++) wanted = wanted || std::atoi(argv[a]) == i + 1;
        if (!wanted) continue;
        printf("%2d  %-53s ", i + 1, rungs[i].name);
        fflush(stdout);
        try {
            const Verdict verdict = check(rungs[i]);
            if (!verdict.written) {
                printf("not written yet\n");
                continue;
            }
            const double seconds = dev::median_seconds([&] { run(rungs[i]); });
            printf("%8.1f  %8.0f%%", 1e6 * seconds, 100 * limit.seconds / seconds);
            if (previous > 0) printf("  %7.2fx", previous / seconds);
            else printf("         -");
            printf("  %s%s\n", verdict.right ? "" : "WRONG: ", verdict.text.c_str());
            wrong = wrong || !verdict.right;
            previous = seconds;
        } catch (const Error& e) {
            // After an illegal access every call of CUDA fails. `build/ladder_... 5` then runs rung 5 alone.
            printf("WRONG: %s\n", e.what());
            wrong = true;
        }
    }
    return wrong;
}
// The same for two sets of data that compare and run rungs themselves.
template <class Rung, class Data>
int climb(const std::vector<Rung>& rungs, const Limit& limit, int argc, char** argv, Data& small,
          Data& large) {
    return climb(
        rungs, limit, argc, argv, [&](const Rung& rung) { return small.against_reference(rung); },
        [&](const Rung& rung) { large.run(rung); });
}

// Returns what the body of main() returns; or 1 if it throws an Error, whose message is printed.
template <class Body> int print_error_of(Body body) try { return body(); } catch (const Error& e) {
    fprintf(stderr, "%s\n", e.what());
    return 1;
}

}  // namespace ladder
