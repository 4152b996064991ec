// pages.cpp - what dev/*.md says is so: quotations and names of tests in WALK.md, tables in dev/README.md.
#include <regex>

#include "../help/files.h"

#define main write_tables
#include "../../dev/evidence/gpus.cpp"
#undef main

using namespace coat::test;

// The lines of a text, without what they are indented by, and without empty ones.
static std::string flat(const std::string& text) {
    return std::regex_replace("\n" + text + "\n", std::regex("\n\\s*"), "\n");
}

TEST_CASE("WALK.md: every quoted line is in its file in the same order") {
    std::string source, quoted;  // the file; lines of it that follow each other
    size_t at = 0, quotations = 0;
    for (const std::string& line : lines_of(read_file("dev/WALK.md"))) {
        const bool fence = line.rfind("```", 0) == 0;
        if (!fence && flat(line) != "\n// ...\n") {
            if (!source.empty()) quoted += line + "\n";
            continue;
        }
        if (!quoted.empty()) {
            CAPTURE(quoted);
            at = source.find(flat(quoted), at);
            REQUIRE(at != source.npos);
            at++, quotations++, quoted.clear();
        }
        if (fence) at = 0, source = line.rfind("```cpp ", 0) == 0 ? flat(read_file(line.substr(7))) : "";
    }
    CHECK(quotations > 20);
}

TEST_CASE("WALK.md: its pictures are there") {
    const std::regex picture("\\(([^)]*\\.svg)\\)");
    const std::string walk = read_file("dev/WALK.md");
    for (std::sregex_iterator found(walk.begin(), walk.end(), picture), end; found != end; ++found)
        CHECK_MESSAGE(fs::exists("dev/" + (*found)[1].str()), (*found)[1].str());
}

TEST_CASE("WALK.md: the tests that it names exist") {
    const std::regex space("\\s+"), joined("\"\\s*\n\\s*\""), named("Tests?: `([^`]+)`(, `([^`]+)`)?"),
        place("^(cpu|gpu): (ranks: )?");  // a macro puts it before the name
    std::string sources;
    for (const auto& entry : fs::recursive_directory_iterator("test"))
        if (entry.is_regular_file()) sources += std::regex_replace(read_file(entry.path()), joined, "");
    const std::string walk = std::regex_replace(read_file("dev/WALK.md"), space, " ");
    size_t tests = 0;
    for (std::sregex_iterator match(walk.begin(), walk.end(), named), end; match != end; ++match)
        for (const std::string& name : {(*match)[1].str(), (*match)[3].str()}) {
            CHECK_MESSAGE(contains(sources, "\"" + std::regex_replace(name, place, "") + "\""), name);
            tests += !name.empty();
        }
    CHECK(tests >= 12);
}

TEST_CASE("README.md: every figure of its table of results is in dev/RESULTS.md") {
    const std::string readme = read_file("README.md"), results = read_file("dev/RESULTS.md");
    const std::regex number("[0-9][0-9,.]*[0-9]");
    for (const std::string& line : lines_of(readme.substr(readme.find("## Results"))))
        for (std::sregex_iterator found(line.begin(), line.end(), number), end; found != end; ++found)
            if (line[0] == '|') CHECK_MESSAGE(contains(results, (*found)[0].str()), line);
}

TEST_CASE("dev/README.md: which recipe runs how on a compute capability and which model fits in a GPU") {
    const std::string page = read_file("dev/README.md");
    CHECK(contains(page, recipes_by_capability()));
    if (knows_gpus()) CHECK(contains(page, models_by_gpu()));
}
