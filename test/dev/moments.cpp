// moments.cpp - dev/moments.py: what it finds in the moments of a small run. Without NumPy it is skipped.
#include "../help/program.h"

using namespace coat;
using namespace coat::test;

NUMPY_TEST_CASE("moments.py: expansion fills the range and lowers the error; a part of the range does less") {
    const RunFolder folder;
    require_success(tiny(folder, "--steps 3 --warmup 0 --optimizer fp32 --out out"));
    const Ended ended = python(folder, "-m moments out");
    require_success(ended);
    const auto found = nlohmann::json::parse(ended.out);
    CHECK(found.at("step") == 3);
    for (const char* moment : {"m", "v"}) {
        INFO(std::string(moment));
        const double before = found.at(moment).at("log10_range").at("median");
        const double expanded = found.at(moment).at("log10_range_expanded").at("median");
        CHECK(before < 5);
        CHECK(expanded == doctest::Approx(std::log10(229376)).epsilon(0.01));
    }
    // The mean square error of the update, by the formats of m and v.
    const auto& error = found.at("update");
    for (const std::string f : {"E4M3", "E5M2"}) {
        const std::string expanded = f + " + expansion";
        CHECK(error.at(expanded).at(expanded) < error.at(f).at(f));
    }
    const auto& parts = found.at("parts_of_range");  // by how often the range is halved
    CHECK(parts.at("0") == error.at("E4M3 + expansion").at("E4M3 + expansion"));
    CHECK(parts.at("0") < parts.at("1"));
    CHECK(parts.at("1") < parts.at("2"));
}
