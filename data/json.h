// data/json.h - JSON from files (json.cpp). A file may come from anywhere and be wrong about everything. What
// is wrong is an Error that names the file, the field and what was expected.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>
#include <nlohmann/json.hpp>

#include "../common/text.h"

namespace coat {

using nlohmann::json;
using nlohmann::ordered_json;  // its fields keep their order

// One JSON object of a file, whose fields are checked as they are read. A field that is null counts as
// missing, as in Hugging Face's config.json.
struct Fields {
    std::string path;  // of the file, for errors
    json object;

    bool has(const std::string& field) const { return object.contains(field) && !object[field].is_null(); }

    // The field as a T. A missing field has the value `otherwise`; without this value it is an Error.
    //   int64_t   a whole number up to 10^15, so that sums do not overflow
    //   float     a positive number
    //   Fields    an object
    //   others    double, bool, std::string, std::vector<int64_t>: what JSON calls them
    template <class T> T get(const std::string& field, const std::optional<T>& otherwise = {}) const;

    // Throws an Error, which says that the field is not what is expected.
    [[noreturn]] void reject(const std::string& field, const std::string& expected) const;
};

// Error if the text is not an object, is nested too deep, or takes too much memory. The path is for errors.
Fields parse_json(const std::string& path, std::string_view text);
Fields read_json(const std::string& path);  // parses the text of a file

template <class T> T Fields::get(const std::string& field, const std::optional<T>& otherwise) const {
    if (otherwise && !has(field)) return *otherwise;
    const json value = has(field) ? object[field] : json();
    const auto expect = [&](bool ok, const char* expected) {
        if (!ok) reject(field, expected);
    };
    const auto is_natural = [](const json& number) {
        return number.is_number_unsigned() && number.get<double>() <= 1e15;
    };
    if constexpr (std::is_same_v<T, int64_t>) {
        expect(is_natural(value), "a whole number up to 10^15");
    } else if constexpr (std::is_same_v<T, float>) {
        expect(value.is_number(), "a positive number");
        expect(value.get<float>() > 0 && value.get<float>() < INFINITY, "a positive number");
    } else if constexpr (std::is_same_v<T, double>) {
        expect(value.is_number(), "a number");
    } else if constexpr (std::is_same_v<T, bool>) {
        expect(value.is_boolean(), "true or false");
    } else if constexpr (std::is_same_v<T, std::string>) {
        expect(value.is_string(), "text");
    } else if constexpr (std::is_same_v<T, std::vector<int64_t>>) {
        expect(value.is_array() && std::all_of(value.begin(), value.end(), is_natural),
               "a list of whole numbers up to 10^15");
    } else {
        static_assert(std::is_same_v<T, Fields>);
        expect(value.is_object(), "an object");
        return Fields{path, value};
    }
    if constexpr (!std::is_same_v<T, Fields>) return value.get<T>();
}

}  // namespace coat
