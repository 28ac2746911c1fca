// A stand-in for libcudart: one device in host memory, whose work is done at once, or never.
//
// A stream that is "stuck" waits for a collective that never ends (nccl.c); so do events that are recorded on it, and
// streams that wait for those. The file that CLUSTERDDP_RELEASE names, once it exists, completes all of them.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_DEVICE = 101, NOT_READY = 600 };
typedef struct { int stuck; } Stream, Event;

static Stream usual;
static Stream *of(void *stream) { return (size_t)stream < 4096 ? &usual : stream; }  // 0 to 2 name the default streams
static int pending(int stuck) {
  const char *release = getenv("CLUSTERDDP_RELEASE");
  return stuck && (release == NULL || access(release, F_OK));
}

int cudaGetDeviceCount(int *count) { return *count = 1, SUCCESS; }
int cudaGetDevice(int *device) { return *device = 0, SUCCESS; }
int cudaSetDevice(int device) { return device ? INVALID_DEVICE : SUCCESS; }
int cudaDriverGetVersion(int *version) { return *version = 13020, SUCCESS; }
int cudaRuntimeGetVersion(int *version) { return *version = 12010, SUCCESS; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) { return *value = 1, SUCCESS; }
int cudaDeviceGetStreamPriorityRange(int *least, int *most) { return *least = 0, *most = -5, SUCCESS; }
int cudaDeviceGetPCIBusId(char *text, int length, int device) {
  return snprintf(text, length, "0000:17:00.0"), SUCCESS;
}
// The offsets of cudaDeviceProp in CUDA 12 and 13.
int cudaGetDeviceProperties(char *properties, int device) {
  memset(properties, 0, 1008);
  strcpy(properties, "stand-in");
  *(size_t *)(properties + 288) = 1ull << 34;  // totalGlobalMem
  *(int *)(properties + 308) = 32;             // warpSize
  *(int *)(properties + 320) = 1024;           // maxThreadsPerBlock
  *(int *)(properties + 360) = 8;              // major
  *(int *)(properties + 388) = 8;              // multiProcessorCount
  return SUCCESS;
}
int cudaGetDeviceProperties_v2(char *properties, int device) { return cudaGetDeviceProperties(properties, device); }

int cudaMalloc(void **memory, size_t bytes) {
  return *memory = aligned_alloc(512, (bytes + 511) / 512 * 512), SUCCESS;
}
int cudaFree(void *memory) { return free(memory), SUCCESS; }
int cudaHostAlloc(void **memory, size_t bytes, unsigned flags) { return *memory = malloc(bytes), SUCCESS; }
int cudaFreeHost(void *memory) { return free(memory), SUCCESS; }
int cudaMemGetInfo(size_t *unused, size_t *total) { return *unused = *total = 1ull << 34, SUCCESS; }
int cudaMemcpy(void *to, void *from, size_t bytes, int kind) { return memcpy(to, from, bytes), SUCCESS; }
int cudaMemcpyAsync(void *to, void *from, size_t bytes, int kind, void *stream) {
  return memcpy(to, from, bytes), SUCCESS;
}
int cudaMemsetAsync(void *memory, int value, size_t bytes, void *stream) {
  return memset(memory, value, bytes), SUCCESS;
}
int cudaPointerGetAttributes(int *attributes, void *pointer) {
  memset(attributes, 0, 24);
  attributes[0] = 2;  // cudaMemoryTypeDevice
  return SUCCESS;
}

int cudaStreamCreate(void **stream) { return *stream = calloc(1, sizeof(Stream)), SUCCESS; }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return cudaStreamCreate(stream); }
int cudaStreamGetPriority(void *stream, int *priority) { return *priority = 0, SUCCESS; }
int cudaStreamQuery(void *stream) { return pending(of(stream)->stuck) ? NOT_READY : SUCCESS; }
int cudaStreamSynchronize(void *stream) {
  while (pending(of(stream)->stuck)) usleep(1000);
  return SUCCESS;
}
int cudaStreamIsCapturing(void *stream, int *status) { return *status = 0, SUCCESS; }
int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id) {
  if (id) *id = 0;
  return *status = 0, SUCCESS;
}
int cudaStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *id) {
  return cudaStreamGetCaptureInfo(stream, status, id);
}
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
  return of(stream)->stuck |= ((Event *)event)->stuck, SUCCESS;
}

int cudaEventCreate(void **event) { return *event = calloc(1, sizeof(Event)), SUCCESS; }
int cudaEventCreateWithFlags(void **event, unsigned flags) { return cudaEventCreate(event); }
int cudaEventDestroy(void *event) { return free(event), SUCCESS; }
int cudaEventRecord(void *event, void *stream) { return ((Event *)event)->stuck = of(stream)->stuck, SUCCESS; }
int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) { return cudaEventRecord(event, stream); }
int cudaEventQuery(void *event) { return pending(((Event *)event)->stuck) ? NOT_READY : SUCCESS; }
int cudaEventSynchronize(void *event) {
  while (pending(((Event *)event)->stuck)) usleep(1000);
  return SUCCESS;
}
int cudaEventElapsedTime(float *milliseconds, void *begin, void *end) { return *milliseconds = 1, SUCCESS; }

const char *cudaGetErrorString(int error) { return "an error of the stand-in"; }
const char *cudaGetErrorName(int error) { return "cudaErrorStandIn"; }
int cudaFuncGetAttributes(void *attributes, void *function) { return memset(attributes, 0, 48), SUCCESS; }
void **__cudaRegisterFatBinary(void *binary) {
  static void *handle;
  return &handle;
}
