# All images of the mesh, with one shared build stage:
#
#   docker build -t diy-sm-proxy:dev --target proxy .      (make images builds all images)
#
# PROFILE is the cargo profile: dist is small and fast, dev is quick to build (the Tiltfile's choice). PROGRAMS=packaged takes the programs
# that make release has built.
ARG PROGRAMS=compiled

FROM rust:1.95-slim-bookworm AS compiled
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ARG PROFILE=dist
ENV CARGO_PROFILE_DEV_STRIP=debuginfo
WORKDIR /src
COPY . .
# Cargo compares modification times. The cache may contain newer artifacts of other sources, so changed files get the current time.
RUN --mount=type=cache,target=/usr/local/cargo/registry,sharing=locked \
    --mount=type=cache,target=/src/target,sharing=locked \
    built="target/sources-$PROFILE" && touch "$built" \
 && find . -path ./target -prune -o -type f -print0 | xargs -0 sha256sum | sort >/tmp/sources \
 && comm -13 "$built" /tmp/sources | cut -c 67- | xargs -r touch \
 && cargo build --config .cargo/static.toml --locked --profile "$PROFILE" --bins \
      -p diy-mesh-controller -p diy-mesh-injector -p diy-mesh-proxy -p diy-mesh-proxy-init -p diy-mesh-sample-apps \
 && mv /tmp/sources "$built" \
 && mkdir /out && cd "target/$(rustc --print host-tuple)/$(echo "$PROFILE" | sed 's/^dev$/debug/')" \
 && cp controller injector proxy proxy-init http-client http-server grpc-client grpc-server /out/

FROM debian:bookworm-slim AS packaged
COPY target/package/bin/ /out/

FROM $PROGRAMS AS build
RUN mkdir /out/etc && echo 'hosts: files dns' >/out/etc/nsswitch.conf

# iptables for proxy-init-iptables: the multi-call binaries of both backends with their libraries and extensions. Certificates of public CAs for the
# controller, which fetches keys of token issuers.
FROM debian:bookworm-slim AS debian
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates iptables
RUN cp --parents -L -t /srv /etc/ssl/certs/ca-certificates.crt
RUN mkdir /out \
 && cp --parents -r /usr/sbin/xtables-nft-multi /usr/sbin/xtables-legacy-multi "/usr/lib/$(uname -m)-linux-gnu/xtables" /out/ \
 && ldd /usr/sbin/xtables-*-multi /out/usr/lib/*/xtables/*.so | grep -oE '/[^ :()]+ \(' | cut -d' ' -f1 | sort -u | xargs cp --parents -L -t /out

# Base of all images: empty except for nsswitch.conf (name lookup in /etc/hosts, then DNS). No shell, not root.
FROM scratch AS run
COPY --from=build /out/etc/ /etc/
USER 65532:65532

FROM run AS controller
# With an arena for each thread, a connected proxy takes a third more memory.
ENV MALLOC_ARENA_MAX=1
COPY --from=debian /srv/ /
COPY --from=build /out/controller /usr/local/bin/
ENTRYPOINT ["/usr/local/bin/controller"]

FROM run AS injector
COPY --from=build /out/injector /usr/local/bin/
ENTRYPOINT ["/usr/local/bin/injector"]

FROM run AS proxy
COPY --from=build /out/proxy /usr/local/bin/
ENTRYPOINT ["/usr/local/bin/proxy"]

# Runs as root: the kernel requires it to load redirect rules.
FROM run AS proxy-init
USER 0
COPY --from=build /out/proxy-init /usr/local/bin/
ENTRYPOINT ["/usr/local/bin/proxy-init"]

# The same for kernels without nf_tables: the image diy-sm-proxy-init:TAG-iptables.
FROM proxy-init AS proxy-init-iptables
COPY --from=debian /out/ /
ENTRYPOINT ["/usr/local/bin/proxy-init", "--iptables"]

FROM run AS http-client
COPY --from=build /out/http-client /usr/local/bin/
ENTRYPOINT ["/usr/local/bin/http-client"]

FROM run AS http-server
COPY --from=build /out/http-server /usr/local/bin/
ENTRYPOINT ["/usr/local/bin/http-server"]

FROM run AS grpc-client
COPY --from=build /out/grpc-client /usr/local/bin/
ENTRYPOINT ["/usr/local/bin/grpc-client"]

FROM run AS grpc-server
COPY --from=build /out/grpc-server /usr/local/bin/
ENTRYPOINT ["/usr/local/bin/grpc-server"]
