// A libcuda.so.1 in host memory: the driver's calls for virtual memory, and its documented rules. The real Python
// bindings run on top. Each device's memory is one memfd, so that a CPU can compute in it. A mapping is inaccessible until
// access has been granted to the device of the calling thread, and fresh memory is full of NaN bits. A call that breaks a
// rule fails and is recorded; one call that a real driver may refuse can be made to fail. Other processes map memory that
// was exported to them: the file's name encodes the device, and its position encodes offset and size.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <fcntl.h>
#include <unistd.h>

#define NAME "fake-device-"

typedef int CUresult;
typedef uint64_t u64;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, NOT_FOUND = 500, NOT_PERMITTED = 800 };
enum { POSIX_FD = 1, MOST = 1 << 16, DEVICES = 4 };

typedef struct { int type, id; } Location;
typedef struct {
  int type, handle_types;
  Location location;
  void *win32;
  unsigned char compression, rdma;
  unsigned short usage;
  unsigned char reserved[4];
} Properties;
typedef struct { Location location; int flags; } Access;

typedef struct { u64 size, offset; int live, mappings, device, kinds, file, imported; } Handle;
typedef struct { u64 address, size; void *raw; u64 raw_size; int live; } Reservation;
typedef struct { u64 address, size, handle; int accessible, live; } Mapping;

static Handle handles[MOST];
static Reservation reservations[MOST];
static Mapping mappings[MOST];
static u64 handle_count = 1, reservation_count, mapping_count, granularity = 2 << 20;
static struct { int file; u64 end; } memory[DEVICES] = {{-1, 0}, {-1, 0}, {-1, 0}, {-1, 0}};
static int peers = 1;
static long calls, fail_at = -1, unmaps_fail;
static char violation[256];
static _Thread_local void *context;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// ------------------------------------------------------------ for tests

void fake_set_granularity(u64 bytes) { granularity = bytes; }
void fake_fail_at(long call, long unmaps_too) { calls = 0, fail_at = call, unmaps_fail = unmaps_too; }
void fake_set_peers(int reach_each_other) { peers = reach_each_other; }
long fake_calls(void) { return calls; }
const char *fake_violation(void) { return violation; }

static u64 live_handles(void) {
  u64 live = 0;
  for (u64 i = 1; i < handle_count; i++) live += handles[i].live;
  return live;
}

static u64 live_reservations(void) {
  u64 live = 0;
  for (u64 i = 0; i < reservation_count; i++) live += reservations[i].live;
  return live;
}

void fake_counts(u64 counts[4]) { // handles, reservations, mappings, mappings without access
  pthread_mutex_lock(&lock);
  counts[0] = live_handles(), counts[1] = live_reservations(), counts[2] = counts[3] = 0;
  for (u64 i = 0; i < mapping_count; i++) {
    counts[2] += mappings[i].live;
    counts[3] += mappings[i].live && !mappings[i].accessible;
  }
  pthread_mutex_unlock(&lock);
}

// ------------------------------------------------------------ rules

static CUresult broken(const char *rule) {
  if (!violation[0]) snprintf(violation, sizeof violation, "%s", rule);
  return INVALID_VALUE;
}

static int here(void) { return (int)(intptr_t)context - 4096; } // the device of the calling thread

static CUresult begin(CUresult refusal) { // refusal: the error with which a real driver may refuse this call; 0: none
  if (!context) return broken("a call from a thread without a context"), INVALID_CONTEXT;
  return refusal && calls++ == fail_at ? refusal : SUCCESS;
}

#define LOCKED(declaration, name, arguments, refusal)                                                                  \
  static CUresult name##_inside declaration;                                                                           \
  CUresult name declaration {                                                                                          \
    pthread_mutex_lock(&lock);                                                                                         \
    CUresult result = begin(refusal);                                                                                  \
    if (!result) result = name##_inside arguments;                                                                     \
    pthread_mutex_unlock(&lock);                                                                                       \
    return result;                                                                                                     \
  }                                                                                                                    \
  static CUresult name##_inside declaration

static int misaligned(u64 value) { return value % granularity != 0; }

static void *map_fixed(u64 address, u64 size, int protection, int fd, u64 offset) {
  int flags = MAP_FIXED | (fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED);
  return mmap((void *)address, size, protection, flags, fd, (off_t)offset);
}

static Mapping *mapping_at(u64 address) {
  for (u64 i = 0; i < mapping_count; i++)
    if (mappings[i].live && mappings[i].address == address) return &mappings[i];
  return NULL;
}

static int whole_mappings(u64 address, u64 size) { // mappings that cover the range without a hole
  u64 at = address;
  while (at < address + size) {
    Mapping *found = mapping_at(at);
    if (!found) return 0;
    at += found->size;
  }
  return at == address + size;
}

static int device_of(int file) { // -1: not a device's memory
  char path[64], name[64] = "";
  snprintf(path, sizeof path, "/proc/self/fd/%d", file);
  if (readlink(path, name, sizeof name - 1) < 0) return -1;
  return strncmp(name, "/memfd:" NAME, strlen("/memfd:" NAME)) ? -1 : atoi(name + strlen("/memfd:" NAME));
}

static int same_file(int one, int other) {
  struct stat a, b;
  return !fstat(one, &a) && !fstat(other, &b) && a.st_ino == b.st_ino && a.st_dev == b.st_dev;
}

static void close_unused(int file, int device) { // closes the file unless a live handle uses it
  for (u64 i = 1; i < handle_count; i++)
    if (handles[i].live && handles[i].file == file) return;
  for (u64 i = 1; i < handle_count; i++)
    if (handles[i].file == file) handles[i].file = -1; // the slot must not be reused
  close(file);
  if (memory[device].file == file) memory[device].file = -1;
}

static void free_slot(Mapping *mapping) {
  handles[mapping->handle].mappings--;
  mapping->live = 0;
}

// ------------------------------------------------------------ the driver

CUresult cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
CUresult cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal < DEVICES ? SUCCESS : INVALID_VALUE; }
CUresult cuDeviceGetCount(int *count) { return *count = DEVICES, SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) { return (void)attribute, (void)device, *value = 1, SUCCESS; }
CUresult cuDeviceCanAccessPeer(int *can, int device, int other) { return *can = peers && device != other, SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(void **made, int device) { return *made = (void *)(intptr_t)(4096 + device), SUCCESS; }
CUresult cuCtxSetCurrent(void *given) { return context = given, SUCCESS; }

LOCKED((u64 * out, const Properties *properties, int option), cuMemGetAllocationGranularity, (out, properties, option), 0) {
  (void)option;
  if (properties->type != 1 || properties->location.type != 1) return broken("granularity of memory of no device");
  return *out = granularity, SUCCESS;
}

LOCKED((u64 * out, u64 size, const Properties *properties, u64 flags), cuMemCreate, (out, size, properties, flags), OUT_OF_MEMORY) {
  if (!size || misaligned(size) || flags) return broken("create: size is no multiple of the granularity");
  if (properties->type != 1 || properties->location.type != 1) return broken("create: not pinned on a device");
  if (properties->handle_types & ~POSIX_FD) return NOT_PERMITTED; // like a fabric without permission
  int device = properties->location.id;
  if (device < 0 || device >= DEVICES) return broken("create: on no device");
  if (memory[device].file < 0) {
    char name[32];
    snprintf(name, sizeof name, NAME "%d", device);
    memory[device].file = memfd_create(name, MFD_CLOEXEC), memory[device].end = 0;
  }
  int file = memory[device].file;
  u64 at = 1; // reuse the slot of a released handle of the same size
  while (at < handle_count && (handles[at].live || handles[at].size != size || handles[at].file != file)) at++;
  if (at == MOST) return OUT_OF_MEMORY;
  if (at == handle_count) {
    handles[handle_count++] = (Handle){size, memory[device].end, 0, 0, device, 0, file, 0};
    memory[device].end += size;
    if (ftruncate(file, (off_t)memory[device].end)) return OUT_OF_MEMORY;
  }
  void *fresh = mmap(NULL, size, PROT_WRITE, MAP_SHARED, file, (off_t)handles[at].offset);
  if (fresh == MAP_FAILED) return OUT_OF_MEMORY;
  memset(fresh, 0xff, size);
  munmap(fresh, size);
  handles[at].live = 1, handles[at].kinds = properties->handle_types;
  return *out = at, SUCCESS;
}

LOCKED((u64 handle), cuMemRelease, (handle), 0) {
  if (handle >= handle_count || !handles[handle].live) return broken("release: no such handle");
  if (handles[handle].mappings) return broken("release: the handle is still mapped");
  handles[handle].live = 0;
  close_unused(handles[handle].file, handles[handle].device);
  if (!live_handles()) handle_count = 1, mapping_count = 0;
  return SUCCESS;
}

LOCKED((int *out, u64 handle, int kind, u64 flags), cuMemExportToShareableHandle, (out, handle, kind, flags), OUT_OF_MEMORY) {
  if (handle >= handle_count || !handles[handle].live || flags) return broken("export: no such handle");
  const Handle *h = &handles[handle];
  if (kind != POSIX_FD || !(h->kinds & POSIX_FD) || h->imported) return broken("export: the memory was not made for that");
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", h->file);
  int file = open(path, O_RDWR | O_CLOEXEC); // with its own file position
  if (file < 0) return OUT_OF_MEMORY;
  lseek(file, (off_t)(h->offset | h->size / granularity), SEEK_SET);
  return *out = file, SUCCESS;
}

LOCKED((u64 * out, void *os_handle, int kind), cuMemImportFromShareableHandle, (out, os_handle, kind), OUT_OF_MEMORY) {
  int file = (int)(intptr_t)os_handle, device = device_of(file);
  off_t position = lseek(file, 0, SEEK_CUR);
  u64 size = (u64)position % granularity * granularity, offset = (u64)position - (u64)position % granularity;
  if (kind != POSIX_FD || device < 0 || position < 0 || !size) return broken("import: not a file that was exported");
  u64 at = 1;
  while (at < handle_count && handles[at].live) at++;
  if (at == MOST) return OUT_OF_MEMORY;
  int kept = -1; // one file per device memory
  for (u64 i = 1; i < handle_count && kept < 0; i++)
    if (handles[i].live && handles[i].imported && same_file(handles[i].file, file)) kept = handles[i].file;
  if (kept < 0) kept = fcntl(file, F_DUPFD_CLOEXEC, 0);
  if (kept < 0) return OUT_OF_MEMORY;
  handles[at] = (Handle){size, offset, 1, 0, device, 0, kept, 1};
  if (at == handle_count) handle_count++;
  return *out = at, SUCCESS;
}

LOCKED((Properties * out, u64 handle), cuMemGetAllocationPropertiesFromHandle, (out, handle), 0) {
  if (handle >= handle_count || !handles[handle].live) return broken("properties: no such handle");
  memset(out, 0, sizeof *out);
  out->type = 1, out->handle_types = handles[handle].kinds;
  out->location = (Location){1, handles[handle].device};
  return SUCCESS;
}

LOCKED((u64 * out, u64 size, u64 alignment, u64 wanted, u64 flags), cuMemAddressReserve, (out, size, alignment, wanted, flags), OUT_OF_MEMORY) {
  if (!size || misaligned(size) || alignment || wanted || flags) return broken("reserve: size is no multiple of the granularity");
  u64 slot = 0;
  while (slot < reservation_count && reservations[slot].live) slot++;
  if (slot == MOST) return OUT_OF_MEMORY;
  u64 raw_size = size + granularity;
  void *raw = mmap(NULL, raw_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return OUT_OF_MEMORY;
  u64 address = ((u64)raw + granularity - 1) / granularity * granularity;
  reservations[slot] = (Reservation){address, size, raw, raw_size, 1};
  if (slot == reservation_count) reservation_count++;
  return *out = address, SUCCESS;
}

LOCKED((u64 address, u64 size), cuMemAddressFree, (address, size), 0) {
  for (u64 i = 0; i < mapping_count; i++)
    if (mappings[i].live && mappings[i].address >= address && mappings[i].address < address + size)
      return broken("free: something is still mapped there");
  for (u64 i = 0; i < reservation_count; i++)
    if (reservations[i].live && reservations[i].address == address && reservations[i].size == size) {
      reservations[i].live = 0;
      return munmap(reservations[i].raw, reservations[i].raw_size), SUCCESS;
    }
  return broken("free: not a reservation as it was made");
}

LOCKED((u64 address, u64 size, u64 offset, u64 handle, u64 flags), cuMemMap, (address, size, offset, handle, flags), OUT_OF_MEMORY) {
  if (misaligned(address) || misaligned(size) || offset || flags) return broken("map: alignment, offset or flags");
  if (handle >= handle_count || !handles[handle].live || handles[handle].size != size) return broken("map: not the handle's size");
  if (handles[handle].mappings) return broken("map: the handle is mapped elsewhere"); // CUDA allows this, but Ballast never intends it
  int inside = 0;
  for (u64 i = 0; i < reservation_count; i++) {
    const Reservation *r = &reservations[i];
    inside |= r->live && address >= r->address && address + size <= r->address + r->size;
  }
  if (!inside) return broken("map: outside of every reservation");
  u64 slot = mapping_count;
  for (u64 i = 0; i < mapping_count; i++) {
    if (!mappings[i].live) slot = i;
    else if (mappings[i].address < address + size && address < mappings[i].address + mappings[i].size)
      return broken("map: overlaps another mapping");
  }
  if (slot == MOST) return OUT_OF_MEMORY;
  mappings[slot] = (Mapping){address, size, handle, 0, 1};
  if (slot == mapping_count) mapping_count++;
  handles[handle].mappings++;
  return SUCCESS;
}

LOCKED((u64 address, u64 size, const Access *access, u64 count), cuMemSetAccess, (address, size, access, count), OUT_OF_MEMORY) {
  if (count != 1 || access->location.type != 1 || access->flags != 3) return broken("access: not to read and write from one device");
  if (!whole_mappings(address, size)) return broken("access: not mapped from end to end");
  if (access->location.id != here()) return broken("access: not for the device that this process computes on");
  for (u64 at = address; at < address + size; at += mapping_at(at)->size)
    if (!peers && handles[mapping_at(at)->handle].device != here()) return broken("access: to a device that is out of reach");
  for (u64 at = address; at < address + size;) {
    Mapping *found = mapping_at(at);
    if (map_fixed(at, found->size, PROT_READ | PROT_WRITE, handles[found->handle].file, handles[found->handle].offset) == MAP_FAILED) return OUT_OF_MEMORY;
    found->accessible = 1;
    at += found->size;
  }
  return SUCCESS;
}

LOCKED((u64 address, u64 size), cuMemUnmap, (address, size), unmaps_fail ? INVALID_VALUE : 0) {
  if (!size || !whole_mappings(address, size)) return broken("unmap: not a number of whole mappings");
  for (u64 at = address; at < address + size;) {
    Mapping *found = mapping_at(at);
    at += found->size;
    free_slot(found);
  }
  return map_fixed(address, size, PROT_NONE, -1, 0), SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name) { return (void)error, *name = "FAKE", SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) { return (void)error, *text = "fake", SUCCESS; }

CUresult cuGetProcAddress_v2(const char *name, void **found, int version, u64 flags, int *status) {
  (void)version, (void)flags;
  static void *self;
  if (!self) {
    Dl_info here;
    dladdr((void *)&cuInit, &here);
    self = dlopen(here.dli_fname, RTLD_NOLOAD | RTLD_LAZY);
  }
  *found = strcmp(name, "cuGetProcAddress") ? dlsym(self, name) : (void *)cuGetProcAddress_v2;
  if (status) *status = *found ? 0 : 1;
  return *found ? SUCCESS : NOT_FOUND;
}
CUresult cuGetProcAddress(const char *name, void **found, int version, u64 flags) { return cuGetProcAddress_v2(name, found, version, flags, NULL); }
