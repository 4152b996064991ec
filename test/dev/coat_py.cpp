// coat_py.cpp - dev/coat.py, the method in NumPy, against the reference: codes, scales and k of random
// tensors, a step of AdamW, and the gradients of a Llama layer.
//
// A test writes its inputs as raw files, runs a few lines of Python that read them and write what coat.py
// makes of them, and compares. Where NumPy is missing (apt-get install python3-numpy), they are skipped.
#include "../../reference.h"
#include "../help/program.h"
#include "../help/random.h"
#include "../help/model.h"

using namespace coat;
using namespace coat::test;
using namespace coat::reference;

namespace {

const bool NO_NUMPY = std::system("python3 -c 'import numpy' >/dev/null 2>&1") != 0;
using Floats = std::vector<float>;
using Bytes = std::vector<uint8_t>;

// A folder of raw arrays. In its Python, load("x") is the file x in FP32, and save("y", array) writes y.
struct Arrays : Folder {
    template <class T> void put(const std::string& name, const std::vector<T>& x) const {
        write(name, std::string(reinterpret_cast<const char*>(x.data()), x.size() * sizeof(T)));
    }
    template <class T> std::vector<T> get(const std::string& name) const {
        const std::string bytes = read_file(path / name);
        std::vector<T> x(bytes.size() / sizeof(T));
        std::memcpy(x.data(), bytes.data(), x.size() * sizeof(T));
        return x;
    }
    void python(const std::string& lines) const {
        write("run.py", "import sys\nsys.path.insert(0, '" + fs::absolute("dev").string() +
                            "')\nfrom coat import *\n"
                            "load = lambda name, *shape: np.fromfile(name, F32).reshape(*shape or [-1])\n"
                            "save = lambda name, x: np.ascontiguousarray(x).tofile(name)\n" +
                            lines);
        require_success(shell(*this, "PYTHONDONTWRITEBYTECODE=1 python3 -W error run.py"));
    }
};

double distance(const Floats& x, const Floats& expected) {  // relative to what is expected
    REQUIRE(x.size() == expected.size());
    double difference = 0, size = 0;
    for (size_t i = 0; i < x.size(); i++) {
        difference += std::pow(double(x[i]) - expected[i], 2);
        size += std::pow(double(expected[i]), 2);
    }
    return std::sqrt(difference / size);
}

// Random values of many magnitudes; some are zero.
Floats values(Random& rng, int64_t n, double spread) {
    Floats x(n);
    for (float& v : x) v = rng.below(50) == 0 ? 0.0f : float(rng.normal() * std::exp(spread * rng.normal()));
    return x;
}

}  // namespace

TEST_CASE("coat.py: codes of both formats, BF16, and codes and scales of tensors and groups" *
          doctest::skip(NO_NUMPY)) {
    FRESH_RANDOM(rng);
    const Arrays folder;
    Floats x = values(rng, 20000, 8);
    for (float special : {448.0f, 464.0f, 464.1f, 1e30f, INFINITY, -INFINITY, NAN, -0.0f, 0x1p-10f, 0x3p-11f})
        x.push_back(special);
    for (int code = 0; code < 0x7B; code++)  // ties
        for (Format f : {Format::E4M3, Format::E5M2})
            x.push_back((decode(f, uint16_t(code)) + decode(f, uint16_t(code + 1))) / 2);
    const int64_t rows = 37, cols = 96;
    Floats matrix = values(rng, rows * cols, 2);
    std::fill_n(matrix.begin(), 16, 0.0f);
    matrix[16] = 1e-42f;
    folder.put("x", x), folder.put("matrix", matrix);
    folder.python(
        "x, matrix = load('x'), load('matrix', 37, 96)\n"
        "for f, name in ((E4M3, 'e4m3'), (E5M2, 'e5m2')):\n"
        "    save(name, encode(f, x)), save(name + '.values', decode(f, np.arange(256)))\n"
        "    codes, s = quantize_tensor(f, matrix)\n"
        "    save(name + '.tensor', codes), save(name + '.scale', s)\n"
        "save('bf16', bf16(x))\n"
        "codes, s = quantize_groups(matrix)\n"
        "save('groups', codes), save('scales', s), save('decoded', dequantize_groups(codes, s))\n");
    auto same = [](float a, float b) { return std::memcmp(&a, &b, 4) == 0 || (a != a && b != b); };
    for (Format f : {Format::E4M3, Format::E5M2}) {
        const std::string name = info(f).name;
        const Bytes codes = folder.get<uint8_t>(name);
        const Floats decoded = folder.get<float>(name + ".values");
        REQUIRE(codes.size() == x.size());
        int wrong = 0;
        for (size_t i = 0; i < x.size(); i++) wrong += codes[i] != encode(f, x[i]);
        for (int c = 0; c < 256; c++) wrong += !same(decoded[c], decode(f, uint16_t(c)));
        CHECK(wrong == 0);
        const Quantized q = quantize(matrix.data(), rows, cols, {f});
        CHECK((folder.get<uint8_t>(name + ".tensor") == q.codes));
        CHECK(folder.get<float>(name + ".scale").at(0) == q.scale(0, 0));
    }
    const Floats rounded = folder.get<float>("bf16");
    int wrong = 0;
    for (size_t i = 0; i < x.size(); i++) wrong += !same(rounded[i], round_to(Format::BF16, x[i]));
    CHECK(wrong == 0);
    const Quantized q = quantize(matrix.data(), rows, cols, Q_GROUP);
    CHECK((folder.get<uint8_t>("groups") == q.codes));
    CHECK((folder.get<float>("decoded") == dequantize(q)));
    const Floats scales = folder.get<float>("scales");
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c += 16) CHECK(scales[(r * cols + c) / 16] == q.scale(r, c));
}

// Logarithms differ in their last bits. Where one falls on a border, k may differ by 1/256 and a code by one.
TEST_CASE("coat.py: k and codes of moments, and a step of AdamW with FP8 moments" * doctest::skip(NO_NUMPY)) {
    FRESH_RANDOM(rng);
    const Arrays folder;
    const int64_t groups = 200, n = groups * MOMENT_GROUP;
    Floats w = values(rng, n, 0), g = values(rng, n, 1), m(n), v(n);
    for (int64_t i = 0; i < n; i++) {
        const double spread = 0.02 * double(1 + i / MOMENT_GROUP);  // of the group
        m[i] = float(rng.normal() * std::exp(spread * rng.normal()));
        v[i] = float(std::exp(spread * rng.normal()));
    }
    std::fill_n(m.begin(), 128, 0.0f), std::fill_n(v.begin() + 128, 128, 3.0f);  // no range at all
    folder.put("w", w), folder.put("g", g), folder.put("m", m), folder.put("v", v);
    folder.python(
        "w, g, m, v = (load(name, -1, 128) for name in 'wgmv')\n"
        "m, v = store_moment(m, False), store_moment(v, True)\n"
        "new = adamw(w, g, m, v, step=5, lr=0.01)\n"
        "for name, stored in (('m', m), ('v', v), ('new_m', new[1]), ('new_v', new[2])):\n"
        "    for part, x in zip(('.codes', '.max', '.k'), stored): save(name + part, x)\n"
        "save('new_w', new[0])\n");
    auto check = [&](const std::string& name, const Moment& expected) {
        INFO(name);
        const Bytes codes = folder.get<uint8_t>(name + ".codes");
        const Floats max = folder.get<float>(name + ".max"), k = folder.get<float>(name + ".k");
        int other_k = 0, other_code = 0;
        for (int64_t i = 0; i < groups; i++) {
            CHECK(std::abs(max[i] - expected.max[i]) <= 0x1p-21f * expected.max[i]);
            CHECK(std::abs(k[i] - expected.k[i]) <= 1.0f / 256);
            other_k += k[i] != expected.k[i];
        }
        for (int64_t i = 0; i < n; i++) {
            CHECK(std::abs(int(codes[i]) - int(expected.codes[i])) <= 1);
            other_code += codes[i] != expected.codes[i];
        }
        CHECK(other_k <= groups / 100);
        CHECK(other_code <= n / 1000);
    };
    Moment stored_m, stored_v;
    stored_m.init(Format::E4M3, true, n), stored_v.init(Format::E4M3, true, n);
    stored_m.store(m.data(), false), stored_v.store(v.data(), true);
    check("m", stored_m), check("v", stored_v);
    stored_m.load(m.data()), stored_v.load(v.data());
    adamw(adamw_factors({5, 0.01f}, true, 0), n, g.data(), w.data(), m.data(), v.data());
    stored_m.store(m.data(), false), stored_v.store(v.data(), true);
    check("new_m", stored_m), check("new_v", stored_v);
    CHECK(distance(folder.get<float>("new_w"), w) < 1e-6);
}

// Draws weights and tokens for a model of one layer. Returns the largest distance of a gradient from the
// reference's.
static double distance_of_gradients(Random& rng) {
    const Arrays folder;
    const ModelConfig config{"one-layer", LLAMA, 1, 32, 2, 2, 96, 64, 16, false};
    const std::unique_ptr<Model> model = make_reference(setup_of("coat", config, 2, 16));
    for (const Param& p : parameters(config)) {
        std::vector<uint16_t> weight(p.size());
        Floats decoded(p.size());
        for (int64_t i = 0; i < p.size(); i++) {
            weight[i] = to_bf16(float((p.role.weight ? 1 : 0) + 0.15 * rng.normal()));
            decoded[i] = from_bf16(weight[i]);
        }
        model->write(p.name, weight.data());
        folder.put(p.name, decoded);
    }
    std::vector<int32_t> tokens, targets;
    Text(rng.bits(), config.V).next(2, 16, &tokens, &targets);
    folder.put("tokens", tokens), folder.put("targets", targets);
    folder.python(R"(
C, F, T, HS = 32, 96, 16, 16
tokens, targets = np.fromfile("tokens", np.int32), np.fromfile("targets", np.int32)
shapes = {"norm1": C, "norm2": C, "qkv": (-1, C), "attention_out": (-1, C), "gate_up": (-1, C), "down": (-1, F)}
file = lambda name: "layers.0." + name + (".weight" if "norm" in name else "")
w = {name: load(file(name)).reshape(shape) for name, shape in shapes.items()}
embedding, head, final = load("embedding", -1, C), load("head", -1, C), load("final_norm.weight")
out, saved = layer_forward(w, embedding[tokens], T, HS)
x = bf16(out)
y = bf16(rms_norm(x, final))
logits = bf16(y @ head.T).astype(float)
p = np.exp(logits - logits.max(axis=1, keepdims=True))
p /= p.sum(axis=1, keepdims=True)
counted = np.arange(len(targets)), targets
save("loss", F32(np.mean(-np.log(p[counted]))))
p[counted] -= 1
dlogits = bf16(p / len(targets))
dx, dfinal = rms_norm_backward(x, final, bf16(dlogits @ head))
dx, gradients = layer_backward(w, saved, bf16(dx), T, HS)
dembedding = np.zeros_like(embedding)
np.add.at(dembedding, tokens, dx)
gradients = {file(name): gradient for name, gradient in gradients.items()}
gradients |= {"embedding": dembedding, "head": dlogits.T @ y, "final_norm.weight": dfinal}
for name, gradient in gradients.items():
    save(name + ".gradient", bf16(gradient))
)");
    const StepResult result = model->step(tokens.data(), targets.data(), {1, 0.0f});
    CHECK(folder.get<float>("loss").at(0) == doctest::Approx(result.loss).epsilon(1e-3));
    double largest = 0;
    for (const Param& p : parameters(config)) {
        Floats expected(p.size());
        model->read(p.name + ".gradient", expected.data());
        largest = std::max(largest, distance(folder.get<float>(p.name + ".gradient"), expected));
    }
    return largest;
}

// The sums of GEMMs have another order. So in a few draws a value is rounded to another code, and other
// roundings follow. An error of the method makes a distance of 0.02 or more in every draw.
TEST_CASE("coat.py: the loss of a model of one layer, and the gradient of every parameter" *
          doctest::skip(NO_NUMPY)) {
    FRESH_RANDOM(rng);
    double best = 1;
    for (int draw = 0; draw < 6 && best > 0.003; draw++) best = std::min(best, distance_of_gradients(rng));
    CHECK(best < 0.003);
}
