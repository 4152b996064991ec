// moments.cpp - the dynamic range of a real run's optimizer states, and their quantization error in FP8
// (paper section 4, figure 2 and table 1).
//
//   build/evidence_moments CHECKPOINT > moments.json        the checkpoint of a run with --optimizer fp32
//
// Figure 2, for every group of 128: the dynamic range R = largest / smallest non-zero magnitude, the factor k
// of equation 4, and the range R^k after expansion. Table 1: the error of each moment in each format, with
// and without expansion, and of m / (sqrt(v) + eps), which updates the weight, for every pair of formats. All
// values go through Moment::store and load, as in training, so a non-zero second moment never
// becomes zero. Last, what remains of m / sqrt(v) if equation 4 leaves out the smallest codes of E4M3.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <nlohmann/json.hpp>

#include "../../data/checkpoint.h"
#include "../../data/safetensors.h"
#include "../../reference.h"

namespace {

using namespace coat;
using Json = nlohmann::ordered_json;

struct Coding {
    const char* name;
    Format format;
    bool expand;
};
constexpr Coding CODINGS[] = {{"E4M3", Format::E4M3, false},
                              {"E4M3 + expansion", Format::E4M3, true},
                              {"E5M2", Format::E5M2, false},
                              {"E5M2 + expansion", Format::E5M2, true}};
constexpr int WAYS = 4;
constexpr int GROUPS[] = {8, 16, 32, 64, 128};  // MOMENT_GROUP = 128 is the largest
constexpr int64_t CHUNK = 1 << 15;              // elements per task of a thread
constexpr double EPS = 1e-8;                    // AdamW's

double weight_update(double m, double v) { return m / (std::sqrt(v) + EPS); }

// Errors of x: the mean relative error weighs all elements alike; sqrt(noise / signal) weighs large ones
// more.
struct Deviation {
    double signal = 0, noise = 0, relative = 0;
    int64_t elements = 0;
    void add(double x, double decoded) {
        if (x == 0) return;
        signal += x * x, noise += (x - decoded) * (x - decoded),
            relative += std::abs(x - decoded) / std::abs(x), elements++;
    }
    void add(const Deviation& e) {
        signal += e.signal, noise += e.noise, relative += e.relative, elements += e.elements;
    }
    Json json() const {
        return {{"mean_square_error", noise / elements},
                {"root_noise_to_signal", std::sqrt(noise / signal)},
                {"mean_relative", relative / elements}};
    }
};

struct Histogram {
    double low, width;
    std::vector<int64_t> counts;  // values out of range count in the first or last bin
    std::vector<float> all;
    Histogram(double from, double to, int bins) : low(from), width((to - from) / bins), counts(bins) {}
    void add(double x) {
        counts[static_cast<size_t>(
            std::clamp((x - low) / width, 0.0, static_cast<double>(counts.size()) - 1))]++;
        all.push_back(static_cast<float>(x));
    }
    Json json() {
        std::sort(all.begin(), all.end());
        auto at = [&](double share) {
            return all[static_cast<size_t>(share * static_cast<double>(all.size() - 1))];
        };
        return {{"low", low},     {"width", width},    {"counts", counts},
                {"p10", at(0.1)}, {"median", at(0.5)}, {"p90", at(0.9)}};
    }
};

struct Moments {  // of one parameter tensor
    std::vector<float> m, v;
};

// The moments of all parameters that may have FP8 optimizer states.
std::vector<Moments> read(const std::string& checkpoint, const ModelConfig& config) {
    const Safetensors file(checkpoint + "/optimizer.state");
    auto values = [&](const std::string& name, const Param& p) {
        const Tensor& t = file.require(name, {p.rows, p.cols}, "F32");  // of a run with --optimizer fp32
        std::vector<float> x(p.size());
        std::memcpy(x.data(), t.data, t.bytes);
        return x;
    };
    std::vector<Moments> all;
    for (const Param& p : parameters(config))
        if (p.role.fp8_state) all.push_back({values(p.name + ".m", p), values(p.name + ".v", p)});
    return all;
}

void through(const Coding& c, bool second, int group, const float* x, int64_t n, float* out) {
    reference::Moment moment;
    moment.init(c.format, c.expand, n, group);
    moment.store(x, second);
    moment.load(out);
}

struct Errors {
    Deviation m[WAYS], v[WAYS], update[WAYS][WAYS];
    void add(const Errors& e) {
        for (int i = 0; i < WAYS; i++) {
            m[i].add(e.m[i]), v[i].add(e.v[i]);
            for (int j = 0; j < WAYS; j++) update[i][j].add(e.update[i][j]);
        }
    }
};

Errors errors_of_chunk(int group, const float* m, const float* v, int64_t n) {
    Errors e;
    std::vector<float> decoded_m[WAYS], decoded_v[WAYS];
    for (int way = 0; way < WAYS; way++) {
        decoded_m[way].resize(n), decoded_v[way].resize(n);
        through(CODINGS[way], false, group, m, n, decoded_m[way].data());
        through(CODINGS[way], true, group, v, n, decoded_v[way].data());
        for (int64_t i = 0; i < n; i++)
            e.m[way].add(m[i], decoded_m[way][i]), e.v[way].add(v[i], decoded_v[way][i]);
    }
    for (int64_t i = 0; i < n; i++)
        for (int a = 0; a < WAYS; a++)
            for (int b = 0; b < WAYS; b++)
                e.update[a][b].add(weight_update(m[i], v[i]),
                                   weight_update(decoded_m[a][i], decoded_v[b][i]));
    return e;
}

Errors errors(int group, const std::vector<Moments>& all) {
    Errors total;
    for (const Moments& p : all) {
        const int64_t n = static_cast<int64_t>(p.m.size());
        // Summed in order, so the result does not depend on the number of threads
        std::vector<Errors> chunks(ceil_div(n, CHUNK));
#pragma omp parallel for schedule(dynamic)
        for (int64_t i = 0; i < static_cast<int64_t>(chunks.size()); i++)
            chunks[i] = errors_of_chunk(group, p.m.data() + i * CHUNK, p.v.data() + i * CHUNK,
                                        std::min(CHUNK, n - i * CHUNK));
        for (const Errors& e : chunks) total.add(e);
    }
    return total;
}

// The largest and the smallest magnitude that is not zero, of the group that begins at `first`.
std::pair<float, float> extremes(const std::vector<float>& x, size_t first) {
    float largest = 0, smallest = INFINITY;
    for (size_t i = first; i < std::min(x.size(), first + MOMENT_GROUP); i++) {
        const float a = std::abs(x[i]);
        largest = std::max(largest, a);
        if (a > 0) smallest = std::min(smallest, a);
    }
    return {largest, smallest};
}

// Figure 2: log10 of the range before and after expansion, and k.
Json ranges(const std::vector<Moments>& all, std::vector<float> Moments::*moment) {
    Histogram before(0, 12, 60), after(0, 12, 60), k(0, 24, 96);
    int64_t zero = 0;
    for (const Moments& p : all) {
        const std::vector<float>& x = p.*moment;
        for (size_t first = 0; first < x.size(); first += MOMENT_GROUP) {
            const auto [largest, smallest] = extremes(x, first);
            if (largest == 0) {
                zero++;
                continue;
            }
            const double range =
                std::log10(static_cast<double>(largest)) - std::log10(static_cast<double>(smallest));
            const float factor = reference::expansion_factor(Format::E4M3, largest, smallest);
            before.add(range), after.add(factor * range), k.add(factor);
        }
    }
    return {{"groups", before.all.size()},
            {"zero_groups", zero},
            {"log10_range", before.json()},
            {"log10_range_expanded", after.json()},
            {"k", k.json()}};
}

// E4M3 with expansion where k stretches a group not to FMAX / FMIN, but to FMAX / (FMIN 2^halvings).
std::vector<float> through_part_of_range(const std::vector<float>& x, bool second, int halvings) {
    const Format format = Format::E4M3;
    const float log_range = std::log2(info(format).max) - std::log2(info(format).min) - float(halvings);
    std::vector<float> out(x.size());
    for (size_t first = 0; first < x.size(); first += MOMENT_GROUP) {
        const auto [largest, smallest] = extremes(x, first);
        const float log_ratio = std::log2(largest) - std::log2(smallest);
        const float k = std::clamp(std::rint(256 * log_range / log_ratio) / 256, 1 / 16.0f, 64.0f);
        for (size_t i = first; i < std::min(x.size(), first + MOMENT_GROUP); i++) {
            const float expanded = reference::expand(format, x[i], largest, k);
            float y = reference::decode(format, reference::encode(format, expanded));
            if (second && x[i] > 0 && y == 0) y = info(format).min;
            out[i] = reference::contract(format, y, largest, k);
        }
    }
    return out;
}

Json parts_of_range(const std::vector<Moments>& all) {
    Json rows;
    for (int halvings : {0, 1, 2}) {
        Deviation update;
        double factor = 1;  // the largest by which a second moment is too large or too small
        for (const Moments& p : all) {
            const std::vector<float> m = through_part_of_range(p.m, false, halvings),
                                     v = through_part_of_range(p.v, true, halvings);
            for (size_t i = 0; i < m.size(); i++) {
                update.add(weight_update(p.m[i], p.v[i]), weight_update(m[i], v[i]));
                if (p.v[i] > 0) factor = std::max({factor, double(v[i]) / p.v[i], double(p.v[i]) / v[i]});
            }
        }
        rows.push_back({{"smallest", std::ldexp(info(Format::E4M3).min, halvings)},
                        {"update", update.json()},
                        {"factor_of_v", factor}});
    }
    return rows;
}

Json report(const std::string& checkpoint) {
    const ModelConfig config = read_model_config(checkpoint);
    const std::vector<Moments> all = read(checkpoint, config);
    int64_t elements = 0;
    for (const Moments& p : all) elements += static_cast<int64_t>(p.m.size());
    Json out = {{"step", read_loop_state(checkpoint).step},
                {"elements", elements},
                {"m", ranges(all, &Moments::m)},
                {"v", ranges(all, &Moments::v)}};
    for (int group : GROUPS) {
        const Errors e = errors(group, all);
        Json one = {
            {"group", group}, {"m", Json::object()}, {"v", Json::object()}, {"update", Json::object()}};
        for (int a = 0; a < WAYS; a++) {
            one["m"][CODINGS[a].name] = e.m[a].json(), one["v"][CODINGS[a].name] = e.v[a].json();
            for (int b = 0; b < WAYS; b++)
                one["update"][CODINGS[a].name][CODINGS[b].name] = e.update[a][b].json();
        }
        out["errors"].push_back(one);
    }
    out["parts_of_range"] = parts_of_range(all);
    return out;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        if (argc != 2)
            throw Error(
                "Usage: evidence_moments CHECKPOINT, where CHECKPOINT is the --out folder of ./train "
                "--optimizer fp32.");
        std::cout << report(coat::find_checkpoint(argv[1])).dump(1) << "\n";
    } catch (const std::exception& e) {
        std::cerr << e.what() << "\n";
        return 1;
    }
}
