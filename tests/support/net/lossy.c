// A user-space link between two network namespaces, for kernels without netem. Root and /dev/net/tun are needed.
//
//   lossy NETNS_A IF_A NETNS_B IF_B DELAY_MS LOSS RATE_MBIT IDLE_S LOGFILE
//
// DELAY_MS one way, LOSS a probability per packet, RATE_MBIT (0: no limit) with a tail-drop queue, all for each
// direction. IDLE_S > 0: a stateful firewall forgets a TCP flow after so many silent seconds, and drops it silently.
//
//   SIGUSR1   the link is down: a black hole        SIGUSR2   it is up again
//   SIGWINCH  the firewall forgets all flows (it starts anew, a VPN rekeys): their packets vanish, new flows pass
//   SIGHUP    counts of bytes and of each flow into the log
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define QUEUE 512
#define FLOWS 4096
#define MTU 2048

struct packet { double at; int length; unsigned char bytes[MTU]; };
struct direction {
  struct packet *queue;
  int head, waiting;
  double free_at;
  long sent, lost, tail, blocked, bytes;
} way[2];
struct flow { uint32_t a, b; uint16_t p, q; double last, longest; long packets; int dead; } flows[FLOWS];
static int flow_count = 0;
static FILE *journal;
static double began;

static volatile sig_atomic_t down = 0, stop = 0, report = 0, forget = 0;

static void on_signal(int number) {
  if (number == SIGUSR1) down = 1;
  else if (number == SIGUSR2) down = 0;
  else if (number == SIGHUP) report = 1;
  else if (number == SIGWINCH) forget = 1;
  else stop = 1;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec / 1e9;
}

static int open_tun(const char *namespace, const char *name) {
  char path[256];
  snprintf(path, sizeof path, "/var/run/netns/%s", namespace);
  int ns = open(path, O_RDONLY);
  if (ns < 0 || setns(ns, CLONE_NEWNET)) { perror(path); exit(1); }
  close(ns);
  int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
  if (tun < 0) { perror("/dev/net/tun"); exit(1); }
  struct ifreq request;
  memset(&request, 0, sizeof request);
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  strncpy(request.ifr_name, name, IFNAMSIZ - 1);
  if (ioctl(tun, TUNSETIFF, &request)) { perror("TUNSETIFF"); exit(1); }
  return tun;
}

// The flow of an IPv4 TCP packet, both directions as one; NULL for any other packet.
static struct flow *flow_of(const unsigned char *packet, int length) {
  if (length < 40 || packet[0] >> 4 != 4 || packet[9] != 6) return NULL;
  int header = (packet[0] & 15) * 4;
  uint32_t a, b;
  uint16_t p, q;
  memcpy(&a, packet + 12, 4); memcpy(&b, packet + 16, 4);
  memcpy(&p, packet + header, 2); memcpy(&q, packet + header + 2, 2);
  if (a > b) {
    uint32_t address = a; a = b; b = address;
    uint16_t port = p; p = q; q = port;
  }
  for (int i = flow_count - 1; i >= 0; i--)
    if (flows[i].a == a && flows[i].b == b && flows[i].p == p && flows[i].q == q) return &flows[i];
  if (flow_count == FLOWS) return NULL;
  struct flow *flow = &flows[flow_count++];
  memset(flow, 0, sizeof *flow);
  flow->a = a; flow->b = b; flow->p = p; flow->q = q; flow->last = now();
  return flow;
}

// Whether the firewall lets the packet pass.
static int passes(const unsigned char *packet, int length, double t, double idle) {
  struct flow *flow = flow_of(packet, length);
  if (!flow) return 1;
  double gap = t - flow->last;
  if (gap > flow->longest) flow->longest = gap;
  if (idle > 0 && gap > idle && flow->packets > 3 && !flow->dead) {
    flow->dead = 1;
    fprintf(journal, "%.1f flow %d<->%d forgotten after %.1f s\n", t - began, ntohs(flow->p), ntohs(flow->q), gap);
  }
  flow->last = t;
  flow->packets++;
  return !flow->dead;
}

static void forget_all(double t) {
  int count = 0;
  for (int i = 0; i < flow_count; i++)
    if (!flows[i].dead) { flows[i].dead = 1; count++; }
  fprintf(journal, "%.1f all %d flows forgotten\n", t - began, count);
}

static void write_report(double t) {
  for (int i = 0; i < 2; i++)
    fprintf(journal, "%.1f %s sent %ld lost %ld tail %ld blocked %ld bytes %ld\n", t - began, i ? "B>A" : "A>B",
            way[i].sent, way[i].lost, way[i].tail, way[i].blocked, way[i].bytes);
  for (int i = 0; i < flow_count; i++)
    fprintf(journal, "  flow %d<->%d packets %ld longest silence %.1f silent for %.1f%s\n", ntohs(flows[i].p),
            ntohs(flows[i].q), flows[i].packets, flows[i].longest, t - flows[i].last, flows[i].dead ? " forgotten" : "");
}

// Hands on what is due in a direction, and returns when the next packet is.
static double deliver(struct direction *d, int out, double t, double next) {
  while (d->waiting && d->queue[d->head].at <= t) {
    struct packet *packet = &d->queue[d->head];
    if (!down && write(out, packet->bytes, packet->length) < 0) { /* the other end's interface is not up yet */ }
    d->head = (d->head + 1) % QUEUE;
    d->waiting--;
  }
  return d->waiting && d->queue[d->head].at < next ? d->queue[d->head].at : next;
}

int main(int count, char **arguments) {
  if (count < 10) { fprintf(stderr, "lossy: nine arguments, see lossy.c\n"); return 2; }
  double delay = atof(arguments[5]) / 1e3, loss = atof(arguments[6]);
  double rate = atof(arguments[7]) * 1e6 / 8, idle = atof(arguments[8]);
  journal = fopen(arguments[9], "a");
  if (!journal) { perror(arguments[9]); return 1; }
  setvbuf(journal, NULL, _IOLBF, 0);
  int ends[2] = {open_tun(arguments[1], arguments[2]), open_tun(arguments[3], arguments[4])};
  srand48(getpid());
  for (int i = 0; i < 2; i++) way[i].queue = malloc(sizeof(struct packet) * QUEUE);
  int signals[] = {SIGUSR1, SIGUSR2, SIGHUP, SIGWINCH, SIGTERM, SIGINT};
  for (unsigned i = 0; i < sizeof signals / sizeof *signals; i++) signal(signals[i], on_signal);
  began = now();
  int was_down = 0;
  while (!stop) {
    double t = now(), next = t + 0.5;
    if (down != was_down) { was_down = down; fprintf(journal, "%.1f link %s\n", t - began, down ? "down" : "up"); }
    for (int i = 0; i < 2; i++) next = deliver(&way[i], ends[1 - i], t, next);
    if (forget) { forget = 0; forget_all(t); }
    if (report) { report = 0; write_report(t); }
    struct pollfd waits[2] = {{ends[0], POLLIN, 0}, {ends[1], POLLIN, 0}};
    int milliseconds = (int)((next - now()) * 1000 + 0.5);
    poll(waits, 2, milliseconds < 0 ? 0 : milliseconds);
    for (int i = 0; i < 2; i++) {
      struct direction *d = &way[i];
      unsigned char bytes[MTU];
      int length;
      while ((length = read(ends[i], bytes, sizeof bytes)) > 0) {
        t = now();
        if (!passes(bytes, length, t, idle) || down) { d->blocked++; continue; }
        if (drand48() < loss) { d->lost++; continue; }
        if (d->waiting == QUEUE) { d->tail++; continue; }
        d->free_at = (d->free_at > t ? d->free_at : t) + (rate > 0 ? length / rate : 0);
        struct packet *packet = &d->queue[(d->head + d->waiting++) % QUEUE];
        packet->at = d->free_at + delay;
        packet->length = length;
        memcpy(packet->bytes, bytes, length);
        d->sent++;
        d->bytes += length;
      }
    }
  }
  return 0;
}
