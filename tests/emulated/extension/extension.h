// What the two files of the extension share.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

// Add `make_backend` to the module; in c10d.cpp, apart, because it takes longest to compile.
void bind_c10d(py::module_& module);
