// explore.cpp - dev/explore.html: its arithmetic against the reference, on all codes and on random values.
//
// node runs the first script of the page. Where there is no node (apt-get install nodejs), the test is
// skipped.
#include <cstring>

#include "../../reference.h"
#include "../help/oracle.h"
#include "../help/program.h"
#include "../help/random.h"

using namespace coat;
using namespace coat::test;

TEST_CASE("explore.html: codes, scales and expansion are those of the reference" *
          doctest::skip(std::system("node --version >/dev/null 2>&1") != 0)) {
    FRESH_RANDOM(rng);
    const int n = 10000;
    std::vector<float> x(n);
    for (int i = 0; i < n; i++) x[i] = float(rng.normal() * std::exp(6 * rng.normal()));
    for (int code = 0; code < 0x7E; code++)  // ties
        x[code] = (reference::decode(Format::E4M3, uint16_t(code)) +
                   reference::decode(Format::E4M3, uint16_t(code + 1))) /
                  2;
    for (int i = 300; i < 400; i++) x[i] = float_of((bits_of(x[i]) & 0xFFFF0000) | 0x8000);  // ties of BF16
    x[200] = NAN, x[201] = INFINITY, x[202] = -0.0f, x[203] = 0.0f;
    const std::string page = read_file("dev/explore.html"), tag = "<script id=\"arithmetic\">";
    const size_t first = page.find(tag) + tag.size();
    const Folder folder;
    folder.write("in", std::string(reinterpret_cast<const char*>(x.data()), n * sizeof(float)));
    // For each value: E4M3, E5M2, BF16, the scale if it is an amax; k of it and the next one, and x expanded
    // and contracted in that group.
    folder.write("run.js", page.substr(first, page.find("</script>", first) - first) + R"(
const fs = require("fs"), bytes = fs.readFileSync("in");
const x = new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length)), out = [];
for (const f of [E4M3, E5M2]) for (let code = 0; code < 256; code++) out.push(decode(f, code));
x.forEach((v, i) => {
  const a = Math.abs(v), b = Math.abs(x[(i + 1) % x.length]), max = Math.max(a, b);
  const k = expansionFactor(max, Math.min(a, b)), y = expand(v, max, k);
  out.push(encode(E4M3, v), encode(E5M2, v), toBF16(v), scaleOf(E4M3, a), k, y, contract(y, max, k));
});
fs.writeFileSync("out", Buffer.from(Float32Array.from(out).buffer));
)");
    require_success(shell(folder, "node run.js"));
    const std::string bytes = read_file(folder.path / "out");
    REQUIRE(bytes.size() == (512 + 7 * n) * sizeof(float));
    std::vector<float> out(512 + 7 * n);
    std::memcpy(out.data(), bytes.data(), bytes.size());
    auto same = [](float a, float b) { return a == b || (a != a && b != b); };
    int wrong = 0, other_k = 0;
    for (int code = 0; code < 512; code++)
        wrong += !same(out[code], reference::decode(code < 256 ? Format::E4M3 : Format::E5M2, code & 255));
    CHECK(wrong == 0);
    for (int i = 0; i < n; i++) {
        const float *got = &out[512 + 7 * i], v = x[i], a = std::abs(v), b = std::abs(x[(i + 1) % n]);
        CAPTURE(v);
        CHECK(got[0] == reference::encode(Format::E4M3, v));
        CHECK(got[1] == reference::encode(Format::E5M2, v));
        if (!std::isfinite(v) || !std::isfinite(b) || a == 0 || b == 0) continue;
        const float max = std::max(a, b), k = reference::expansion_factor(Format::E4M3, max, std::min(a, b));
        CHECK(got[2] == reference::round_to(Format::BF16, v));
        CHECK(got[3] == reference::scale_of(Q_E4M3, a));
        // Logarithms differ in their last bits: k rarely by 1/256, and the powers a little.
        CHECK(std::abs(got[4] - k) <= 1.0f / 256);
        other_k += got[4] != k;
        CHECK(got[5] ==
              doctest::Approx(reference::expand(Format::E4M3, v, max, got[4])).epsilon(1e-3).scale(0));
        CHECK(got[6] ==
              doctest::Approx(reference::contract(Format::E4M3, got[5], max, got[4])).epsilon(1e-4).scale(0));
    }
    CHECK(other_k < n / 100);
}
