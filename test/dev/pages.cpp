// pages.cpp - what dev/*.md and the README say is so: quotations in WALK.md and the tests that it names, and
// the tables of GPUs in dev/README.md.
#include <regex>

#include "../help/files.h"

#define main write_tables
#include "../../dev/evidence/gpus.cpp"
#undef main

using namespace coat::test;

namespace {

bool begins(const std::string& line, const char* with) { return line.rfind(with, 0) == 0; }
std::string trimmed(const std::string& line) {
    return line.substr(std::min(line.find_first_not_of(' '), line.size()));
}

}  // namespace

TEST_CASE("WALK.md: every quoted line is in its file, in the same order") {
    std::vector<std::string> source;  // the lines of the file that is quoted, but for empty ones
    size_t at = 0, quoted = 0;
    bool gap = false;  // lines were left out before this one
    for (const std::string& line : lines_of(read_file("dev/WALK.md"))) {
        CAPTURE(line);
        if (begins(line, "```")) {
            source.clear();
            if (begins(line, "```cpp ")) source = lines_of(read_file(line.substr(7)));
            for (std::string& of_file : source) of_file = trimmed(of_file);
            source.erase(std::remove(source.begin(), source.end(), ""), source.end());
            at = 0;
        }
        const std::string wanted = trimmed(line);
        if (begins(line, "```") || wanted == "// ...") gap = true;
        else if (!source.empty() && !wanted.empty()) {
            if (gap) at = size_t(std::find(source.begin() + at, source.end(), wanted) - source.begin());
            REQUIRE((at < source.size() && source[at] == wanted));
            gap = false;
            at++, quoted++;
        }
    }
    CHECK(quoted > 40);
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

TEST_CASE("dev/README.md: which recipe runs how on a compute capability, and which model fits in a GPU") {
    const std::string page = read_file("dev/README.md");
    CHECK(contains(page, recipes_by_capability()));
    if (knows_gpus()) CHECK(contains(page, models_by_gpu()));
}
