// pages.cpp - what dev/*.md and the README say is so: quotations in WALK.md, its length, its pictures and the
// tests that it names; the tables of GPUs in dev/README.md. And what the Makefile says of an old CUDA.
#include <regex>

#include "../help/program.h"

#define main write_tables
#include "../../dev/evidence/gpus.cpp"
#undef main

using namespace coat::test;

namespace {

bool begins(const std::string& line, const char* with) { return line.rfind(with, 0) == 0; }
std::string trimmed(const std::string& line) {
    return line.substr(std::min(line.find_first_not_of(' '), line.size()));
}
const std::vector<std::string> WALK = lines_of(read_file("dev/WALK.md"));

}  // namespace

TEST_CASE("WALK.md: every quoted line is in its file, in the same order") {
    std::vector<std::string> source;  // the lines of the file that is quoted, but for empty ones
    size_t at = 0, quoted = 0;
    bool gap = false;  // lines were left out before this one
    for (const std::string& line : WALK) {
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

TEST_CASE("WALK.md: a section has at most 150 words; pictures are there, and have at most 60 kB") {
    std::string section;
    size_t words = 0, pictures = 0;
    bool code = false;
    for (const std::string& line : WALK) {
        if (begins(line, "```")) code = !code;
        if (begins(line, "## ")) section = line, words = 0;
        else if (!code && !begins(line, "![") && !begins(line, "|") && !begins(line, "    ")) {
            std::istringstream in(line);
            words += size_t(std::distance(std::istream_iterator<std::string>(in), {}));
        }
        CHECK_MESSAGE(words <= 150, section);
    }
    CHECK(WALK.size() <= 350);
    for (const std::string page : {"README.md", "dev/WALK.md"}) {
        const std::string text = read_file(page);
        for (size_t at = text.find(".svg)"); at != std::string::npos; at = text.find(".svg)", at + 1)) {
            const size_t begin = text.rfind('(', at) + 1;
            const fs::path path = fs::path(page).parent_path() / text.substr(begin, at + 4 - begin);
            CAPTURE(path.string());
            const size_t size = read_file(path).size();
            CHECK((size > 0 && size <= 60000));
            pictures++;
        }
    }
    CHECK(pictures >= 7);
}

TEST_CASE("WALK.md: the tests that it names exist") {
    const std::regex space("\\s+"), joined("\"\\s*\n\\s*\""), named("Tests?: `([^`]+)`(, `([^`]+)`)?");
    std::string sources;
    for (const auto& entry : fs::recursive_directory_iterator("test"))
        if (entry.is_regular_file()) sources += std::regex_replace(read_file(entry.path()), joined, "");
    const std::string walk = std::regex_replace(read_file("dev/WALK.md"), space, " ");
    size_t tests = 0;
    for (std::sregex_iterator match(walk.begin(), walk.end(), named), end; match != end; ++match)
        for (const std::string& name : {(*match)[1].str(), (*match)[3].str()}) {
            if (name.empty()) continue;
            // A macro may put the place before the name: "gpu: ranks: ". After the last one, at is npos + 2
            // = 1.
            bool found = false;
            for (size_t at = 0; !found && at != 1; at = name.find(": ", at) + 2)
                found = contains(sources, "\"" + name.substr(at) + "\"");
            CHECK_MESSAGE(found, name);
            tests++;
        }
    CHECK(tests >= 12);
}

TEST_CASE("dev/README.md: which recipe runs how on a compute capability, and which model fits in a GPU") {
    const std::string page = read_file("dev/README.md");
    CHECK(contains(page, recipes_by_capability()));
    if (knows_gpus()) CHECK(contains(page, models_by_gpu()));
}

TEST_CASE("Makefile: an nvcc that is too old ends make in one sentence, before anything is compiled") {
    const Folder folder;
    const std::string make = "make -n -C '" + fs::current_path().string() + "' NVCC=$PWD/nvcc train";
    for (const auto& [release, good] :
         {std::pair{"12.4", false}, {"9.2", false}, {"12.9", true}, {"13.0", true}}) {
        folder.write("nvcc",
                     std::string("#!/bin/sh\necho 'Cuda compilation tools, release ") + release + ", V1'\n");
        const Ended ended = shell(folder, "chmod +x nvcc; unset MAKELEVEL MAKEFLAGS; " + make);
        CAPTURE(ended.error);
        CHECK((ended.code == 0) == good);
        CHECK(contains(ended.error, "needs CUDA 12.9 or newer: install a newer toolkit") == !good);
    }
}
