# The product's images, for users with Docker. Build from the root of the repository:
#   docker build --target claimer .
# `make images` builds the same without Docker, from the table in tools/testbed/src/images.rs; a test compares the two.
FROM rust:1.95-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends cmake && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN cargo build --release --locked --workspace --bin claimer --bin operator --bin webhook
# The shim runs in images that may have no C library.
RUN cargo rustc --locked --package shim --bin shim --profile shim --target-dir target/static -- -C target-feature=+crt-static
# Each image holds the program, the libraries it links to, and a user to run as. Images that connect to public servers also hold the
# certificate authorities.
RUN for name in claimer operator webhook; do \
      root=/images/$name && mkdir -p $root/etc $root/tmp && chmod 1777 $root/tmp && cp target/release/$name $root/ && \
      ldd $root/$name | grep -o '/[^ ]*' | xargs -I{} cp --parents -L {} $root && \
      printf 'root:x:0:0:root:/:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/:/sbin/nologin\n' >$root/etc/passwd && \
      printf 'root:x:0:\nnonroot:x:65532:\n' >$root/etc/group && \
      printf 'hosts: files dns\n' >$root/etc/nsswitch.conf || exit 1; \
    done

FROM scratch AS claimer
COPY --from=build /images/claimer/ /
COPY --from=build /src/target/static/shim/shim /shim
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
ENV PATH=/usr/local/bin:/usr/bin:/bin
LABEL org.opencontainers.image.title="claimer"
LABEL org.opencontainers.image.description="Runs in worker pods: claims one file and fetches it, or publishes the results"
LABEL org.opencontainers.image.version="0.1.0"
LABEL org.opencontainers.image.licenses="Apache-2.0"
USER 65532:65532
ENTRYPOINT ["/claimer"]

FROM scratch AS operator
COPY --from=build /images/operator/ /
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
ENV PATH=/usr/local/bin:/usr/bin:/bin
LABEL org.opencontainers.image.title="operator"
LABEL org.opencontainers.image.description="Lists buckets, queues their files, runs one Job per run, and accounts for every file"
LABEL org.opencontainers.image.version="0.1.0"
LABEL org.opencontainers.image.licenses="Apache-2.0"
USER 65532:65532
ENTRYPOINT ["/operator"]

FROM scratch AS webhook
COPY --from=build /images/webhook/ /
ENV PATH=/usr/local/bin:/usr/bin:/bin
LABEL org.opencontainers.image.title="webhook"
LABEL org.opencontainers.image.description="Admission webhook: defaults, validation and policies"
LABEL org.opencontainers.image.version="0.1.0"
LABEL org.opencontainers.image.licenses="Apache-2.0"
USER 65532:65532
ENTRYPOINT ["/webhook"]
