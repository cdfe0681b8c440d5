//! The table of images: their contents and their declarations.
//!
//! Our own images also have a stage in a `Dockerfile`, for users who have Docker; a test keeps the two equal.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use crate::{
    command,
    error::{Doing, Error, Result},
    gobuild::{COREDNS, Module, PEER, VERSITYGW},
    image::{Content, Image},
    node::Node,
    paths::{self, Paths},
    programs::{self, Profile},
};

/// containerd runs this image to hold a pod's namespaces.
pub const PAUSE: &str = "localhost/openfilter/pause:testbed";

/// The uid that distroless images call "nonroot".
pub const NONROOT: &str = "65532:65532";

/// Path of the shim in an image that contains it.
pub const SHIM: &str = "/shim";

const BUSYBOX: &str = "/bin/busybox";
const PYTHON: &str = "/usr/bin/python3";

/// The origin of an image's program.
#[derive(Debug, Clone, Copy)]
pub enum Source {
    /// A binary of this workspace: package and binary have the same name.
    Cargo,
    /// A Go module of the testbed.
    Go(&'static Module),
    /// A program of one of the machine's packages.
    Machine(&'static str),
    /// A script below `examples/filters`; the program of its image is the machine's interpreter. Users build
    /// the image from the `Dockerfile` beside the script.
    Script(&'static str),
}

/// One line of the table.
#[derive(Debug, Clone, Copy)]
pub struct Recipe {
    /// The image is `localhost/openfilter/<name>:testbed`.
    pub name: &'static str,
    /// The origin of the program.
    pub source: Source,
    /// The path of the program in the image.
    pub program: &'static str,
    /// Arguments that always precede others.
    pub arguments: &'static [&'static str],
    /// Whether it connects to public servers with TLS, and so needs their certificate authorities.
    pub certificates: bool,
    /// Whether it also contains the shim, to be copied into pods.
    pub shim: bool,
    /// One line for `org.opencontainers.image.description`.
    pub description: &'static str,
    /// The set it is loaded with.
    pub set: Set,
}

/// Which images are loaded together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Set {
    /// Every cluster needs these.
    Base,
    /// Valkey and S3.
    Services,
    /// Our program that runs in every worker pod.
    Worker,
    /// The other programs of the product.
    Product,
    /// Sample filters.
    Filters,
    /// Sample filters that are scripts.
    Scripts,
    /// For suites only.
    Tests,
}

/// Every image.
pub const RECIPES: &[Recipe] = &[
    Recipe {
        name: "pause",
        source: Source::Machine(BUSYBOX),
        program: "/bin/sleep",
        arguments: &["2147483647"],
        certificates: false,
        shim: false,
        description: "Holds a pod's namespaces",
        set: Set::Base,
    },
    Recipe {
        name: "coredns",
        source: Source::Go(&COREDNS),
        program: "/coredns",
        arguments: &[],
        certificates: false,
        shim: false,
        description: "Cluster DNS",
        set: Set::Base,
    },
    Recipe {
        name: "busybox",
        source: Source::Machine(BUSYBOX),
        program: BUSYBOX,
        arguments: &[],
        certificates: false,
        shim: false,
        description: "A shell with tools, for tests",
        set: Set::Base,
    },
    Recipe {
        name: "valkey",
        source: Source::Machine("/usr/bin/valkey-server"),
        program: "/usr/bin/valkey-server",
        arguments: &[],
        certificates: false,
        shim: false,
        description: "Valkey from the machine's packages",
        set: Set::Services,
    },
    Recipe {
        name: "s3",
        source: Source::Go(&VERSITYGW),
        program: "/versitygw",
        arguments: &[],
        certificates: false,
        shim: false,
        description: "An S3 server on a folder",
        set: Set::Services,
    },
    Recipe {
        name: "claimer",
        source: Source::Cargo,
        program: "/claimer",
        arguments: &[],
        certificates: true,
        shim: true,
        description: "Runs in worker pods: claims one file and fetches it, or publishes the results",
        set: Set::Worker,
    },
    Recipe {
        name: "operator",
        source: Source::Cargo,
        program: "/operator",
        arguments: &[],
        certificates: true,
        shim: false,
        description: "Lists buckets, queues their files, runs one Job per run, and accounts for every file",
        set: Set::Product,
    },
    Recipe {
        name: "webhook",
        source: Source::Cargo,
        program: "/webhook",
        arguments: &[],
        certificates: false,
        shim: false,
        description: "Admission webhook: defaults, validation and policies",
        set: Set::Product,
    },
    Recipe {
        name: "thumbnail",
        source: Source::Cargo,
        program: "/thumbnail",
        arguments: &[],
        certificates: false,
        shim: false,
        description: "A sample filter: makes a thumbnail of an image",
        set: Set::Filters,
    },
    Recipe {
        name: "annotate",
        source: Source::Cargo,
        program: "/annotate",
        arguments: &[],
        certificates: false,
        shim: false,
        description: "A sample filter: frames an image and writes its name and its colours below it",
        set: Set::Filters,
    },
    Recipe {
        name: "language",
        source: Source::Cargo,
        program: "/language",
        arguments: &[],
        certificates: false,
        description: "A sample filter that stays running: tells the language of a text",
        shim: false,
        set: Set::Filters,
    },
    Recipe {
        name: "file-type",
        source: Source::Script("file-type-py/filter.py"),
        program: PYTHON,
        arguments: &["/filter.py"],
        certificates: false,
        shim: false,
        description: "A sample filter that stays running: tells the type of a file",
        set: Set::Scripts,
    },
    Recipe {
        name: "word-count",
        source: Source::Script("word-count-py/filter.py"),
        program: PYTHON,
        arguments: &["/filter.py"],
        certificates: false,
        shim: false,
        description: "A sample filter: counts the words of a text",
        set: Set::Scripts,
    },
    Recipe {
        name: "checksum",
        source: Source::Script("checksum-sh/filter.sh"),
        program: BUSYBOX,
        arguments: &["sh", "/filter.sh"],
        certificates: false,
        shim: false,
        description: "A sample filter: writes the checksum of a file",
        set: Set::Scripts,
    },
    Recipe {
        name: "probe",
        source: Source::Cargo,
        program: "/probe",
        arguments: &[],
        certificates: false,
        shim: false,
        description: "A filter that does, and fails, on command, for tests",
        set: Set::Tests,
    },
    Recipe {
        name: "peer",
        source: Source::Go(&PEER),
        program: "/peer",
        arguments: &[],
        certificates: false,
        shim: false,
        description: "The other end of a connection that a test needs",
        set: Set::Tests,
    },
];

/// The full name of an image, by its name in the table.
pub fn reference(name: &str) -> String {
    format!("localhost/openfilter/{name}:testbed")
}

impl Recipe {
    /// The contents and declarations of the image.
    fn image(&self, paths: &Paths, program: &Path) -> Result<Image> {
        let mut image = self.declaration();
        let content = match self.source {
            Source::Cargo => Content::Program(programs::stripped(paths, program)?),
            Source::Go(_) | Source::Machine(_) | Source::Script(_) => Content::Copy(program.to_owned()),
        };
        image.add_program(program, content, self.program);
        if self.shim {
            image.files.insert(SHIM.into(), Content::Copy(programs::static_shim(paths)?));
        }
        if self.program == BUSYBOX {
            let listed = command::run(
                "list the tools of busybox",
                &[program.display().to_string().as_str(), "--list"],
            )?;
            for tool in listed.lines().filter(|tool| *tool != "busybox") {
                image.files.insert(format!("/bin/{tool}").into(), Content::Link("busybox".into()));
            }
        }
        if let Source::Script(script) = self.source {
            let source = paths.root.join("examples/filters").join(script);
            let name = source.file_name().unwrap_or_default();
            image.files.insert(Path::new("/").join(name), Content::Copy(source));
        }
        if self.program == PYTHON {
            for module in python_modules(program)? {
                let content = Content::Copy(module.clone());
                // Only libraries need other libraries.
                if module.extension().is_some_and(|extension| extension == "so") {
                    image.add_program(&module, content, &module.display().to_string());
                } else {
                    image.files.insert(module, content);
                }
            }
        }
        Ok(image)
    }

    /// The files of the image besides its program and the program's libraries.
    fn surroundings(&self) -> BTreeMap<PathBuf, Content> {
        let text = |text: &str| Content::Text(text.to_owned());
        let users = "root:x:0:0:root:/:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/:/sbin/nologin\n";
        let mut files = BTreeMap::from([
            ("/tmp".into(), Content::Folder(0o1777)),
            ("/etc/passwd".into(), text(users)),
            ("/etc/group".into(), text("root:x:0:\nnonroot:x:65532:\n")),
            ("/etc/nsswitch.conf".into(), text("hosts: files dns\n")),
        ]);
        if self.certificates {
            let bundle = "/etc/ssl/certs/ca-certificates.crt";
            files.insert(bundle.into(), Content::Copy(bundle.into()));
        }
        files
    }

    /// The image's declarations, without its program.
    pub fn declaration(&self) -> Image {
        let label = |name: &str, value: &str| (format!("org.opencontainers.image.{name}"), value.to_owned());
        let entrypoint = [self.program].iter().chain(self.arguments).map(|word| (*word).to_owned()).collect();
        Image {
            name: reference(self.name),
            files: self.surroundings(),
            // A toolbox has no program of its own: its pods specify the command.
            entrypoint: if self.name == "busybox" { Vec::new() } else { entrypoint },
            user: NONROOT.to_owned(),
            env: vec!["PATH=/usr/local/bin:/usr/bin:/bin".to_owned()],
            labels: BTreeMap::from([
                label("title", self.name),
                label("description", self.description),
                label("version", env!("CARGO_PKG_VERSION")),
                label("licenses", "Apache-2.0"),
            ]),
        }
    }
}

/// The modules that the sample filters import, and those that Python itself needs.
fn python_modules(python: &Path) -> Result<Vec<PathBuf>> {
    const LIST: &str = "import json, os, sys; files = {getattr(module, '__file__', None) for module in sys.modules.values()}; \
                        print('\\n'.join(file for file in files if file))";
    let python = python.display().to_string();
    let listed = command::run("list the modules of Python", &[python.as_str(), "-I", "-c", LIST])?;
    Ok(listed.lines().map(PathBuf::from).collect())
}

/// Builds the images of some sets into `.testbed/images`, and returns their archives.
pub fn build(paths: &Paths, sets: &[Set], profile: Profile) -> Result<Vec<PathBuf>> {
    let wanted: Vec<&Recipe> = RECIPES.iter().filter(|recipe| sets.contains(&recipe.set)).collect();
    let ours = wanted.iter().filter(|recipe| matches!(recipe.source, Source::Cargo));
    let built = programs::build(paths, &ours.map(|recipe| recipe.name).collect::<Vec<_>>(), profile)?;
    let archive = |recipe: &&Recipe| {
        let program = match recipe.source {
            Source::Cargo => built[recipe.name].clone(),
            Source::Go(module) => module.program(paths)?,
            Source::Machine(path) => PathBuf::from(path),
            Source::Script(_) => PathBuf::from(recipe.program),
        };
        let archive = paths.images().join(format!("{}.tar", recipe.name));
        recipe.image(paths, &program)?.write(&archive)?;
        Ok(archive)
    };
    wanted.iter().map(archive).collect()
}

/// Builds the image `name` of the table with another program, perhaps of another version, and another tag.
pub fn build_of(paths: &Paths, name: &str, program: &Path, tag: &str) -> Result<PathBuf> {
    let recipe = RECIPES.iter().find(|recipe| recipe.name == name);
    let recipe = recipe.ok_or_else(|| Error::Refused(format!("there is no image {name}")))?;
    let mut image = recipe.image(paths, program)?;
    image.name = image.name.replace(":testbed", &format!(":{tag}"));
    let archive = paths.images().join(format!("{name}-{tag}.tar"));
    image.write(&archive)?;
    Ok(archive)
}

/// Loads an archive into a node's containerd.
pub fn load(node: &Node, archive: &Path) -> Result<()> {
    // Determined before the load, so that a newer archive that replaces this one meanwhile is noticed.
    let version = version(archive)?;
    let (socket, file) = (node.socket().display().to_string(), archive.display().to_string());
    let doing = format!("load {file} into {}", node.name);
    command::run(&doing, &["ctr", "-a", &socket, "-n", "k8s.io", "images", "import", &file])?;
    paths::write(note(node, archive), version)
}

/// Loads every archive in `.testbed/images` that a node lacks in this version.
pub(crate) fn load_missing(paths: &Paths, node: &Node) -> Result<()> {
    let entries = fs::read_dir(paths.images()).doing(|| format!("list {}", paths.images().display()))?;
    let archives = entries.flatten().map(|entry| entry.path());
    for archive in archives.filter(|path| path.extension().is_some_and(|extension| extension == "tar")) {
        load_if_missing(node, &archive)?;
    }
    Ok(())
}

/// Loads an archive into a node that lacks it in this version.
pub(crate) fn load_if_missing(node: &Node, archive: &Path) -> Result<()> {
    if fs::read_to_string(note(node, archive)).ok() == Some(version(archive)?) {
        return Ok(());
    }
    load(node, archive)
}

fn note(node: &Node, archive: &Path) -> PathBuf {
    node.loaded().join(archive.file_name().unwrap_or_default())
}

/// Distinguishes an archive from the one it replaced: an archive with other bytes is a new file, renamed to
/// this name.
fn version(archive: &Path) -> Result<String> {
    let found = fs::metadata(archive).doing(|| format!("read the state of {}", archive.display()))?;
    Ok(format!("{} {} {}.{:09}", found.ino(), found.len(), found.mtime(), found.mtime_nsec()))
}
