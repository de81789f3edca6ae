// Blocks of the pretend device: memory of the host that is poison before it is written and after it is freed.
#pragma once
#include <c10/core/Allocator.h>

#include "pretend.h"

namespace pretend {

c10::DataPtr take(size_t bytes, c10::Device device);
c10::Allocator* allocator();
Uses* uses_of(const at::Tensor& tensor);  // of a tensor on the device; else null
Uses* uses_of(const c10::DataPtr& data);
void resize_storage(const c10::Storage& storage, size_t bytes);
std::pair<int64_t, int64_t> memory_now_and_peak();
void reset_peak();

}  // namespace pretend
