// plot.cpp - dev/plot.py: what it draws of logs, and the figures of dev/RESULTS.md. Without Python the tests
// are skipped.
#include "../help/program.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <regex>

using namespace coat;
using namespace coat::test;

// The picture of logs in the folder, and what is printed to stderr.
Ended draw(const Folder& folder, const std::string& logs) { return python(folder, "-m plot loss " + logs); }

// A log of so many steps, as ./train writes it: the losses fall from 5, from step to step by `fall`.
static std::string log_of(const std::string& recipe, const std::string& started, int64_t first, int64_t last,
                          double fall) {
    std::string log = nlohmann::json({{"kind", "settings"},
                                      {"step", first - 1},
                                      {"run_started", started},
                                      {"steps", 100},
                                      {"recipe", recipe}})
                          .dump() +
                      "\n";
    for (int64_t step = first; step <= last; step++)
        for (const char* kind : {"step", "validation"})
            log +=
                nlohmann::json({{"kind", kind}, {"step", step}, {"loss", 5 - fall * double(step)}}).dump() +
                "\n";
    return log;
}

static size_t count(const std::string& text, const std::string& part) {
    size_t found = 0;
    for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) found++;
    return found;
}

// The points of each line of a picture: {{"72.0", "62.0"}, ...}.
static std::vector<std::vector<std::pair<double, double>>> lines_in(const std::string& picture) {
    std::vector<std::vector<std::pair<double, double>>> all;
    const std::regex line("polyline points=\"([^\"]*)\"");
    for (std::sregex_iterator found(picture.begin(), picture.end(), line), end; found != end; ++found) {
        std::istringstream points((*found)[1].str());
        char comma;
        all.emplace_back();
        for (double x, y; points >> x >> comma >> y;) all.back().push_back({x, y});
    }
    return all;
}

PYTHON_TEST_CASE(
    "plot.py: a smoothed curve does not lag behind its points at any step of a run of any length") {
    for (const int64_t steps : {3, 8, 30, 100}) {
        INFO(steps);
        Folder folder;
        folder.write("log", log_of("coat", "now", 1, steps, 4.0 / double(steps)));
        const Ended ended = draw(folder, "log");
        require_success(ended);
        const auto lines = lines_in(ended.out);  // training, and validation with the same losses
        REQUIRE(lines.size() == 2);
        CHECK(lines[0] == lines[1]);
    }
    // Noise is smoothed, and a curve that bends is followed to its end.
    Folder folder;
    std::string log = log_of("coat", "now", 1, 0, 0);
    for (int64_t step = 1; step <= 60; step++)
        for (const char* kind : {"step", "validation"}) {
            const double noise = *kind == 's' ? (step % 2 ? 0.3 : -0.3) : 0;
            log += nlohmann::json(
                       {{"kind", kind}, {"step", step}, {"loss", 5 * std::exp(-double(step) / 20) + noise}})
                       .dump() +
                   "\n";
        }
    folder.write("log", log);
    const auto lines = lines_in(draw(folder, "log").out);
    REQUIRE(lines.size() == 2);
    // 370 points are at least 5 nats.
    for (size_t i = 3; i < 60; i++) CHECK(std::fabs(lines[0][i].second - lines[1][i].second) < 9);
}

PYTHON_TEST_CASE("plot.py: steps have whole numbers as ticks") {
    for (const int64_t steps : {1, 2, 3, 5, 9, 14, 15, 250, 1234567}) {
        INFO(steps);
        Folder folder;
        folder.write("log", log_of("coat", "now", steps, steps, 1e-7));
        const std::string picture = draw(folder, "log").out;
        const std::regex tick("text-anchor=\"middle\"[^>]*>([^<]*)</text>");
        int64_t ticks = 0;
        for (std::sregex_iterator found(picture.begin(), picture.end(), tick), end; found != end; ++found) {
            const std::string words = (*found)[1];
            if (words == "step") continue;
            CHECK_MESSAGE(words.find_first_not_of("0123456789") == words.npos, words);
            ticks++;
        }
        CHECK(ticks >= 2);
        CHECK(ticks <= 10);
    }
}

PYTHON_TEST_CASE("plot.py: a log with several runs gives several curves and a resumed run one") {
    Folder folder;
    const std::string first = log_of("coat", "2026-01-01", 1, 8, 0.1),
                      resumed = log_of("coat", "2026-01-01", 7, 20, 0.1),
                      other = log_of("te", "2026-01-02", 1, 20, 0.1),
                      again = log_of("te", "2026-01-03", 1, 20, 0.1);
    std::string evaluation = log_of("bf16", "2026-01-04", 1, 0, 0);
    evaluation.replace(evaluation.find("100"), 3, "0") += R"({"kind": "validation", "step": 0, "loss": 9})"
                                                          "\n";
    folder.write("log", first + resumed + evaluation + other + again +
                            R"({"kind": "st)"
                            "\n" +
                            resumed);
    const Ended ended = draw(folder, "log");
    require_success(ended);
    CHECK(contains(ended.error, "log:" + std::to_string(lines_of(read_file(folder / "log")).size() - 29) +
                                    " is no complete line of a log and is left out."));
    for (const char* name : {">coat  3.000<", ">te  3.000<", ">te 2  3.000<"})
        CHECK(count(ended.out, name) == 1);
    const auto lines = lines_in(ended.out);
    REQUIRE(lines.size() == 6 + 5);  // two of each run, and the differences
    for (size_t i = 0; i < 6; i++) CHECK(lines[i].size() == 20);
    const Ended named = draw(folder, "A=log");
    CHECK(contains(named.out, ">A  3.000<"));
    CHECK(contains(named.out, ">A 2  3.000<"));
    // What is no log, or has no steps, is refused.
    for (const auto& [name, text] :
         {std::pair{"notes", "two\nlines\n"}, {"evaluation", evaluation.c_str()}}) {
        folder.write(name, text);
        CHECK(draw(folder, name).code == 1);
    }
    CHECK(draw(folder, "missing").code == 1);
}

PYTHON_TEST_CASE("plot.py: runs that lie over each other are told apart by their difference to the first") {
    Folder folder;
    folder.write("a", log_of("bf16", "1", 1, 40, 0.1));
    folder.write("b", log_of("coat", "2", 1, 40, 0.0999));  // 0.004 above a at the end
    folder.write("c", log_of("te", "3", 1, 20, 0.1001));    // it ends earlier
    const Ended ended = draw(folder, "a b c");
    require_success(ended);
    CHECK(contains(ended.out, "Loss minus that of bf16"));
    CHECK(contains(ended.out, ">coat  +0.0040<"));
    CHECK(contains(ended.out, ">te  -0.0020<"));
    CHECK(!contains(draw(folder, "a").out, "Loss minus"));
    folder.write("late", log_of("coat", "4", 50, 60, 0.1));  // no step is in both
    require_success(draw(folder, "a late"));
}

PYTHON_TEST_CASE("plot.py: the figures of RESULTS.md are drawn from results.json; a band holds every seed") {
    const Folder folder;
    const Ended ended = python_lines(folder, R"(
import json, pathlib, re
import plot
DEV = pathlib.Path(plot.__file__).parent

def is_same(a, b):  # the same words; coordinates may differ by a rounding to tenths of a pixel
    words_a, words_b = (re.findall(">([^<]+)<", text) for text in (a, b))
    parts_a, parts_b = (re.split(r'(-?\d+\.?\d*)', text.strip()) for text in (a, b))
    close = all(abs(float(x) - float(y)) < 0.11 for x, y in zip(parts_a[1::2], parts_b[1::2]))
    return words_a == words_b and parts_a[::2] == parts_b[::2] and close

for name, svg in plot.figures(json.loads((DEV / "results.json").read_text())).items():
    if not is_same((DEV / "results" / f"{name}.svg").read_text(), svg):
        print(name, "is old: python3 dev/results.py page")
    for color in set(re.findall("#[0-9a-f]{6}", svg.split("</style>")[1])) - set(plot.ON_DARK):
        print(name, "has no colour in the place of", color, "on a dark page")
seeds = [[0.0, 0.02], [0.01, -0.01], [0.005, 0.005]]
panel = plot.spread_panel(0, "#ffffff", "a", seeds, (-0.1, 0.1))
band = next(part for part in panel.parts if "polygon" in part)
corners = [float(corner.split(",")[1]) for corner in band.split('"')[1].split()]
for point, extreme in zip(corners, (0.01, 0.02, -0.01, 0.0)):
    assert abs(point - panel.y(extreme)) < 0.06, band
)");
    require_success(ended);
    CHECK(ended.out.empty());
}

PYTHON_TEST_CASE("plot.py: bench: what is timed only to be compared is no part of a step") {
    const Folder folder;
    const std::string bench = R"({"device": "H200", "runs": [
        {"model": "gpt2", "recipe": "coat", "batch": 64, "seq": 1024, "accumulate": 8,
         "operators": [
            {"group": "linear layers", "name": "qkv", "count": 12, "seconds": 1e-3, "floor": 1e-5},
            {"group": "between the GEMMs", "name": "norm", "count": 12, "seconds": 2e-5, "floor": 1e-5},
            {"group": "attention alone", "name": "forward", "count": 0, "seconds": 9, "floor": null}],
         "step": {"seconds": 0.5, "floors": 0.4, "tokens_per_second": 1e5}}]})";
    folder.write("bench.json", bench);
    const Ended drawn = python_lines(folder, R"(
import json, plot
bench = json.load(open("bench.json"))
print(len(plot.operators_of_step(bench["runs"][0])), "alone" in plot.draw_bench(bench))
)");
    CHECK_MESSAGE(drawn.out == "2 False\n", drawn.out, drawn.error);
}
