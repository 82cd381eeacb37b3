// What oneCCL's static library asks of others, so that nothing but the wheel is needed to link it.
#include <cstddef>
#include <cstring>

#define HIDDEN extern "C" __attribute__((visibility("hidden")))

// The Intel compiler's runtime.
HIDDEN void* _intel_fast_memcpy(void* to, const void* from, size_t n) { return std::memcpy(to, from, n); }
HIDDEN void* _intel_fast_memmove(void* to, const void* from, size_t n) { return std::memmove(to, from, n); }
HIDDEN void* _intel_fast_memset(void* to, int value, size_t n) { return std::memset(to, value, n); }

// hwloc: oneCCL binds the memory of worker threads with it, of which there are none here (the backend
// drives oneCCL from a thread of its own, and the CPU plan places that). A topology that cannot be had is
// a case it handles by leaving memory where it is, so that no library has to be installed for it.
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
