// Functions of other libraries that oneCCL's static library calls, so that linking needs nothing but the wheel.
#include <cstddef>
#include <cstring>

#define HIDDEN extern "C" __attribute__((visibility("hidden")))

// Of the Intel compiler's runtime.
HIDDEN void* _intel_fast_memcpy(void* to, const void* from, size_t n) { return std::memcpy(to, from, n); }
HIDDEN void* _intel_fast_memmove(void* to, const void* from, size_t n) { return std::memmove(to, from, n); }
HIDDEN void* _intel_fast_memset(void* to, int value, size_t n) { return std::memset(to, value, n); }

// Of hwloc, with which oneCCL binds the memory of its worker threads. There are none here: the backend drives
// oneCCL from its own thread, and the CPU plan places that. Without a topology oneCCL leaves memory where it is,
// so that hwloc need not be installed.
HIDDEN int hwloc_topology_init(void** topology) {
  *topology = nullptr;
  return -1;
}
HIDDEN void hwloc_topology_destroy(void*) {}
HIDDEN void hwloc_bitmap_free(void*) {}

#define ABSENT_NUMBER(name) \
  HIDDEN int name() { return -1; }
#define ABSENT_POINTER(name) \
  HIDDEN void* name() { return nullptr; }

ABSENT_NUMBER(hwloc_bitmap_and)
ABSENT_NUMBER(hwloc_bitmap_first)
ABSENT_NUMBER(hwloc_bitmap_isincluded)
ABSENT_NUMBER(hwloc_bitmap_isset)
ABSENT_NUMBER(hwloc_bitmap_iszero)
ABSENT_NUMBER(hwloc_bitmap_next)
ABSENT_NUMBER(hwloc_bitmap_only)
ABSENT_NUMBER(hwloc_bitmap_taskset_snprintf)
ABSENT_NUMBER(hwloc_bitmap_weight)
ABSENT_NUMBER(hwloc_bitmap_zero)
ABSENT_NUMBER(hwloc_free)
ABSENT_NUMBER(hwloc_get_area_membind)
ABSENT_NUMBER(hwloc_get_proc_cpubind)
ABSENT_NUMBER(hwloc_get_type_depth)
ABSENT_NUMBER(hwloc_memattr_get_value)
ABSENT_NUMBER(hwloc_obj_attr_snprintf)
ABSENT_NUMBER(hwloc_obj_type_snprintf)
ABSENT_NUMBER(hwloc_set_membind)
ABSENT_NUMBER(hwloc_topology_load)
ABSENT_NUMBER(hwloc_topology_set_io_types_filter)
ABSENT_POINTER(hwloc_alloc_membind)
ABSENT_POINTER(hwloc_bitmap_alloc)
ABSENT_POINTER(hwloc_get_obj_by_depth)
ABSENT_POINTER(hwloc_obj_type_string)
ABSENT_POINTER(hwloc_topology_get_support)
