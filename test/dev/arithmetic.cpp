// arithmetic.cpp - the method in two other languages against the reference: dev/coat.py in NumPy, and the
// first script of dev/explore.html. Codes, scales and k of random values; of coat.py also a step of AdamW,
// and the loss and the gradients of a model of one layer. A test writes its inputs as raw files and runs a
// few lines of a program that reads them. Without NumPy (apt-get install python3-numpy) or node (nodejs) it
// is skipped.
#include "../help/oracle.h"
#include "../help/program.h"

#include <nlohmann/json.hpp>

#include "../../program/plan.h"

using namespace coat;
using namespace coat::test;
using namespace coat::reference;

const bool NO_NODE = std::system("node --version >/dev/null 2>&1") != 0;

namespace {

// A folder of raw arrays in FP32. In its programs, load("x") is the file x, and save("y", array) writes y.
struct Arrays : Folder {
    void put(const std::string& name, const Floats& x) const {
        write(name, std::string(reinterpret_cast<const char*>(x.data()), x.size() * sizeof(float)));
    }
    Floats get(const std::string& name) const {
        const std::string bytes = read_file(path / name);
        Floats x(bytes.size() / sizeof(float));
        std::memcpy(x.data(), bytes.data(), x.size() * sizeof(float));
        return x;
    }
    void numpy(const std::string& lines) const {
        require_success(python_lines(*this, R"(
from coat import *
load = lambda name, *shape: np.fromfile(name, F32).reshape(*shape or [-1])
def save(name, x):
    assert x.dtype in (F32, np.uint8)  # values and codes
    x.astype(F32).tofile(name)
)" + lines));
    }
    void javascript(const std::string& lines) const {
        const std::string page = read_file("dev/explore.html"), tag = "<script id=\"arithmetic\">";
        const size_t first = page.find(tag) + tag.size();
        write("run.js", page.substr(first, page.find("</script>", first) - first) + R"(
const fs = require("fs"), load = name => new Float32Array(new Uint8Array(fs.readFileSync(name)).buffer);
const save = (name, x) => fs.writeFileSync(name, Buffer.from(Float32Array.from(x).buffer));
)" + lines);
        require_success(shell(*this, "node run.js"));
    }
};

}  // namespace

// Random values of many magnitudes; some are zero.
static Floats values(Random& rng, int64_t n, double spread) {
    Floats x(n);
    for (float& v : x) v = rng.below(50) == 0 ? 0.0f : float(rng.normal() * std::exp(spread * rng.normal()));
    return x;
}

// Values of many magnitudes, special ones, and ties.
static Floats to_encode(Random& rng) {
    Floats x = values(rng, 20000, 8);
    for (int i = 0; i < 100; i++) x[i] = float_of((bits_of(x[i]) & 0xFFFF0000) | 0x8000);  // ties of BF16
    for (float special : {448.0f, 464.0f, 464.1f, 1e30f, INFINITY, -INFINITY, NAN, -0.0f, 0x1p-10f, 0x3p-11f})
        x.push_back(special);
    for (int code = 0; code < 0x7B; code++)
        for (Format f : {Format::E4M3, Format::E5M2})
            x.push_back((decode(f, uint16_t(code)) + decode(f, uint16_t(code + 1))) / 2);
    return x;
}

template <class T> static Floats floats(const std::vector<T>& x) { return Floats(x.begin(), x.end()); }
template <class F> static Floats each(const Floats& x, F f) {
    Floats y(x.size());
    std::transform(x.begin(), x.end(), y.begin(), f);
    return y;
}

// How many values have not the wanted bits, where any NaN is NaN. None is off by more than this.
static int others(const Floats& got, const Floats& wanted, float absolute = 0, float relative = 0) {
    REQUIRE(got.size() == wanted.size());
    int n = 0;
    for (size_t i = 0; i < got.size(); i++) {
        if (bits_of(got[i]) == bits_of(wanted[i]) || (std::isnan(got[i]) && std::isnan(wanted[i]))) continue;
        CHECK(std::abs(got[i] - wanted[i]) <= absolute + relative * std::abs(wanted[i]));
        n++;
    }
    return n;
}

// A program's files of x: "bf16", "e4m3" and "e5m2" (codes), "e4m3.values" and "e5m2.values" (of all codes).
static void check_formats(const Arrays& folder, const Floats& x) {
    CHECK(others(folder.get("bf16"), each(x, [](float v) { return round_to(Format::BF16, v); })) == 0);
    Floats codes(256);
    std::iota(codes.begin(), codes.end(), 0.0f);
    for (Format f : {Format::E4M3, Format::E5M2}) {
        const std::string name = format_info(f).name;
        CAPTURE(name);
        const Floats values = each(codes, [&](float c) { return decode(f, uint16_t(c)); });
        CHECK(others(folder.get(name), each(x, [&](float v) { return float(encode(f, v)); })) == 0);
        CHECK(others(folder.get(name + ".values"), values) == 0);
    }
}

TEST_CASE("explore.html: codes and scales and expansion are those of the reference" *
          doctest::skip(NO_NODE)) {
    SEEDED_RANDOM(rng);
    const Arrays folder;
    const int n = 10000;
    const Floats x = to_encode(rng);
    const Floats v = each(values(rng, n, 6), [](float a) { return a == 0 ? 1 : a; });
    Floats max(n), min(n);  // of groups of two values
    for (int i = 0; i < n; i++)
        std::tie(min[i], max[i]) = std::minmax({std::abs(v[i]), std::abs(v[(i + 1) % n])});
    folder.put("x", x);
    folder.put("v", v);
    folder.put("max", max);
    folder.put("min", min);
    folder.javascript(R"(
const x = load("x"), max = load("max"), min = load("min");
for (const f of [E4M3, E5M2]) {
  save(f.name.toLowerCase(), x.map(v => encode(f, v)));
  save(f.name.toLowerCase() + ".values", Array.from({length: 256}, (_, code) => decode(f, code)));
}
save("bf16", x.map(toBF16));
save("scale", max.map(m => scaleOf(E4M3, m)));
const k = max.map((m, i) => expansionExponent(m, min[i]));
const y = load("v").map((v, i) => expand(v, max[i], k[i]));
save("k", k), save("y", y), save("back", y.map((value, i) => contract(value, max[i], k[i])));
)");
    check_formats(folder, x);
    CHECK(others(folder.get("scale"), each(max, [](float m) { return scale_of(E4M3_PER_TENSOR, m); })) == 0);
    const Floats k = folder.get("k"), y = folder.get("y");
    Floats wanted_k(n), wanted_y(n), wanted_back(n);
    for (int i = 0; i < n; i++) {
        wanted_k[i] = expansion_exponent(Format::E4M3, max[i], min[i]);
        wanted_y[i] = expand(Format::E4M3, v[i], max[i], k.at(i));
        wanted_back[i] = contract(Format::E4M3, y.at(i), max[i], k[i]);
    }
    // Logarithms differ in their last bits: k rarely by 1/256, and the powers a little.
    CHECK(others(k, wanted_k, 1.0f / 256) < n / 100);
    others(y, wanted_y, 0, 1e-3f);
    others(folder.get("back"), wanted_back, 0, 1e-4f);
}

TEST_CASE("explore.html: delayed scales and what they lose are those of the reference" *
          doctest::skip(NO_NODE)) {
    SEEDED_RANDOM(rng);
    const Arrays folder;
    const int steps = 40, n = 200;
    Floats amaxes(steps), x(n);
    for (float& amax : amaxes) amax = float(std::exp(3 * rng.normal()));
    for (float& v : x) v = float(rng.normal() * std::exp(4 * rng.normal()));
    folder.put("amaxes", amaxes);
    folder.put("x", x);
    folder.javascript(R"(
const amaxes = [...load("amaxes")], x = [...load("x")];
for (const f of [E4M3, E5M2])
  for (const history of [1, 3, 16, 1024]) {
    const scales = delayedScales(f, amaxes, history), losses = scales.map(s => lost(f, x, s)), name = f.name.toLowerCase() + history;
    save(name, scales), save(name + "zero", losses.map(l => l.zero)), save(name + "saturated", losses.map(l => l.saturated));
  }
)");
    for (TensorFormat format : {E4M3_PER_TENSOR, E5M2_PER_TENSOR})
        for (int history : {1, 3, 16, 1024}) {
            const std::string name = format_info(format.element_format).name + std::to_string(history);
            CAPTURE(name);
            const Floats scales = folder.get(name), zero = folder.get(name + "zero"),
                         saturated = folder.get(name + "saturated");
            DelayedScale delayed;
            delayed.history.assign(history, 0);
            delayed.scale = scale_of(format, amaxes[0]);  // just in time: there is no history yet
            for (int step = 0; step < steps; step++) {
                CHECK(scales.at(step) == delayed.scale);
                QuantStats lost;
                quantize(x.data(), 1, n, format, {.stats = &lost, .scale = delayed.scale});
                CHECK(zero.at(step) == lost.flushed);
                CHECK(saturated.at(step) == lost.saturated);
                delayed.amax = amaxes[step];
                delayed.update_history_and_scale(format.element_format);
            }
        }
}

TEST_CASE("explore.html: its memory calculator agrees with --plan" * doctest::skip(NO_NODE)) {
    const Arrays folder;
    folder.javascript(R"(
const plans = [];
for (const [model, sizes] of Object.entries(MODELS))
  for (const [recipe, optimizer] of [["coat", "coat"], ["bf16", "fp32"], ["bf16", "bf16"]])
    for (const [groups, master, B, T] of [[false, true, 8, 1024], [true, false, 1, 512], [true, true, 2, 256]]) {
      const flags = {recipe, optimizer, groups: groups && recipe === "coat", master, B, T};
      plans.push({model, ...flags, plan: planOf(sizes, flags)});
    }
fs.writeFileSync("plans.json", JSON.stringify(plans));
)");
    const auto plans = nlohmann::json::parse(read_file(folder.path / "plans.json"));
    CHECK(plans.size() >= 90);
    for (const auto& p : plans) {
        INFO(p.dump());
        RunSettings s{};
        s.config = find_row(known_models(), p["model"].get<std::string>(), "--model");
        s.recipe = find_row(recipes(), p["recipe"].get<std::string>(), "--recipe");
        s.optimizer = find_row(optimizers(), p["optimizer"].get<std::string>(), "--optimizer");
        if (p["groups"]) s.recipe.saved_attention = s.recipe.saved_inputs;
        s.keep_masters = p["master"];
        s.B = p["B"];
        s.T = p["T"];
        const std::vector<MemoryRow> wanted = memory_plan(s);
        const auto& plan = p["plan"];
        CHECK(plan["count"] == parameter_count(s.config));
        CHECK(plan["weights"] == total_bytes(wanted, Category::Weights));
        CHECK(plan["optimizer"] == total_bytes(wanted, Category::Optimizer));
        CHECK(plan["gradients"] == total_bytes(wanted, Category::Gradients));
        CHECK(plan["activations"] == total_bytes(wanted, Category::Activations));
        CHECK(plan["perToken"] == saved_bytes_per_token_and_layer(s));
    }
}

NUMPY_TEST_CASE("coat.py: codes of both formats and of BF16; codes and scales of tensors and groups") {
    SEEDED_RANDOM(rng);
    const Arrays folder;
    const Floats x = to_encode(rng);
    const int64_t rows = 37, cols = 96;
    Floats matrix = values(rng, rows * cols, 2);
    std::fill_n(matrix.begin(), 16, 0.0f);
    matrix[16] = 1e-42f;
    folder.put("x", x);
    folder.put("matrix", matrix);
    folder.numpy(R"(
x, matrix = load("x"), load("matrix", 37, 96)
for f, name in ((E4M3, "e4m3"), (E5M2, "e5m2")):
    save(name, encode(f, x)), save(name + ".values", decode(f, np.arange(256)))
    codes, s = quantize_tensor(f, matrix)
    save(name + ".tensor", codes), save(name + ".scale", s)
save("bf16", bf16(x))
codes, s = quantize_to_groups(matrix)
save("groups", codes), save("decoded", dequantize_groups(codes, s))
)");
    check_formats(folder, x);
    for (Format f : {Format::E4M3, Format::E5M2}) {
        const std::string name = format_info(f).name;
        const StoredMatrix q = quantize(matrix.data(), rows, cols, {f});
        CHECK((folder.get(name + ".tensor") == floats(q.elements)));
        CHECK(folder.get(name + ".scale").at(0) == q.scale(0, 0));
    }
    const StoredMatrix q = quantize(matrix.data(), rows, cols, E4M3_PER_1x16);
    CHECK((folder.get("groups") == floats(q.elements)));
    CHECK((folder.get("decoded") == dequantize(q)));
}

// Logarithms differ in their last bits. Where one falls on a border, k may differ by 1/256 and a code by one.
NUMPY_TEST_CASE("coat.py: k and codes of moments; a step of AdamW with FP8 moments") {
    SEEDED_RANDOM(rng);
    const Arrays folder;
    const int64_t groups = 200, n = groups * MOMENT_GROUP_SIZE;
    Floats w = values(rng, n, 0), g = values(rng, n, 1), m(n), v(n);
    for (int64_t i = 0; i < n; i++) {
        const double spread = 0.02 * double(1 + i / MOMENT_GROUP_SIZE);  // of the group
        m[i] = float(rng.normal() * std::exp(spread * rng.normal()));
        v[i] = float(std::exp(spread * rng.normal()));
    }
    std::fill_n(m.begin(), 128, 0.0f), std::fill_n(v.begin() + 128, 128, 3.0f);  // no range at all
    for (int64_t i = 256; i < 384; i++) {  // a range beyond that of FP32 quotients
        m[i] = float(std::pow(10, 4 - 48 * rng.uniform()));
        v[i] = 1e8f;
    }
    folder.put("w", w), folder.put("g", g), folder.put("m", m), folder.put("v", v);
    folder.numpy(R"(
w, g, m, v = (load(name, -1, 128) for name in "wgmv")
save("new_norm", update_norm(w, g, m, v, step=5, lr=0.01)[0])
m, v = store_moment(m), store_moment(v)
new_w, new_m, new_v = update_matrix(w, g, m, v, step=5, lr=0.01)
for name, stored in (("m", m), ("v", v), ("new_m", new_m), ("new_v", new_v)):
    for part, x in zip((".codes", ".max", ".k"), stored):
        save(name + part, x)
save("new_w", new_w)
)");
    auto check = [&](const std::string& name, const reference::Moment& expected) {
        INFO(name);
        others(folder.get(name + ".max"), expected.max_magnitudes, 0, 0x1p-21f);
        CHECK(others(folder.get(name + ".k"), expected.expansion_exponents, 1.0f / 256) <= groups / 100);
        CHECK(others(folder.get(name + ".codes"), floats(expected.elements), 1) <= n / 1000);
    };
    Floats norm = w, norm_m = m, norm_v = v;  // the weights of norms have FP32 moments and do not decay
    adamw(adamw_constants({5, 0.01f}, /*decays=*/false, /*clip_factor=*/1), n, g.data(), norm.data(),
          norm_m.data(), norm_v.data());
    CHECK(relative_error(folder.get("new_norm"), norm) < 1e-6);
    const OptimizerFormats& coat = find_row(optimizers(), "coat", "--optimizer");
    reference::Moment stored_m(coat, Format::E4M3, n, /*second_moment=*/false);
    reference::Moment stored_v(coat, Format::E4M3, n, /*second_moment=*/true);
    stored_m.store(m.data());
    stored_v.store(v.data());
    check("m", stored_m);
    check("v", stored_v);
    stored_m.load(m.data());
    stored_v.load(v.data());
    adamw(adamw_constants({5, 0.01f}, true, 1), n, g.data(), w.data(), m.data(), v.data());
    stored_m.store(m.data());
    stored_v.store(v.data());
    check("new_m", stored_m);
    check("new_v", stored_v);
    CHECK(relative_error(folder.get("new_w"), w) < 1e-6);
}

// The sums of GEMMs have another order. So in a few draws a value is rounded to another code, and other
// roundings follow. An error of the method makes a distance of 0.02 or more in every draw.
NUMPY_TEST_CASE("coat.py: the loss of a model of one layer and the gradient of every parameter") {
    SEEDED_RANDOM(rng);
    double best = 1;  // of the draws, the largest distance of a gradient from the reference's
    for (int draw = 0; draw < 6 && best > 0.003; draw++) {
        const Arrays folder;
        const ModelConfig config{.name = "one-layer",
                                 .arch = LLAMA,
                                 .L = 1,
                                 .C = 32,
                                 .NH = 2,
                                 .NKV = 2,
                                 .F = 96,
                                 .V = 64,
                                 .max_T = 16,
                                 .tied = false};
        Training t(make_reference_model, settings_of("coat", config, 2, 16));
        for (const Param& p : parameters(config)) {
            Floats weights(p.size());
            for (float& w : weights)
                w = round_to(Format::BF16, float((p.starts_at_one() ? 1 : 0) + 0.15 * rng.normal()));
            write_weights(*t.model, p.name, weights);
            folder.put(p.name, weights);
        }
        t.text = Text(rng.bits(), config.V);
        t.next();
        folder.put("tokens", floats(t.tokens));
        folder.put("targets", floats(t.targets));
        folder.numpy(R"(
C, F, T, HS = 32, 96, 16, 16
tokens, targets = load("tokens").astype(int), load("targets").astype(int)
shapes = {"norm1": C, "norm2": C, "qkv": (-1, C), "attention_out": (-1, C), "gate_up": (-1, C), "down": (-1, F)}
file = lambda name: "layers.0." + name + (".weight" if "norm" in name else "")
w = {name: load(file(name)).reshape(shape) for name, shape in shapes.items()}
embedding, head, final = load("embedding", -1, C), load("head", -1, C), load("final_norm.weight")
out, saved = layer_forward(w, embedding[tokens], T, HS)
loss, dx, dfinal, dhead = head_loss_and_gradients(final, head, out, targets)
save("loss", F32(loss))
dx, gradients = layer_backward(w, saved, dx, T, HS)
dembedding = np.zeros_like(embedding)
np.add.at(dembedding, tokens, dx)
gradients = {file(name): gradient for name, gradient in gradients.items()}
gradients |= {"embedding": dembedding, "head": dhead, "final_norm.weight": dfinal}
for name, gradient in gradients.items():
    save(name + ".gradient", bf16(gradient))
)");
        CHECK(folder.get("loss").at(0) == doctest::Approx(t.again().loss).epsilon(1e-3));
        double largest = 0;
        for (const Param& p : parameters(config)) {
            const Floats got = folder.get(p.name + ".gradient");
            largest = std::max(largest, relative_error(got, gradient(*t.model, p)));
        }
        best = std::min(best, largest);
    }
    CHECK(best < 0.003);
}
