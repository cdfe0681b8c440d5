//! `make demo`: a pipeline on a cluster, from nothing to a contact sheet of results. It prints every command
//! that a reader would type. It can be interrupted and started again at any point.

mod cluster;
mod comparison;
mod deploy;
mod kubectl;
mod pace;
mod paint;
mod pictures;
mod progress;
mod run;
mod settings;
mod sheet;
mod store;
mod tiles;
mod warm;

use std::{error::Error, process::ExitCode, time::Instant};

use clap::Parser;
use crds::v1alpha1::Mode;

use cluster::Cluster;
use comparison::Measured;
use deploy::DEMO_NAMESPACE;
use run::Finished;
use settings::{Args, Where};
use store::CAMERA;

/// Every error is a message for the person at the terminal.
pub type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    let done = if args.down { down(&args) } else { demo(&args).await };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\ndemo: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn demo(args: &Args) -> Result<()> {
    let started = Instant::now();
    println!("OpenFilter Pipelines: two filters over every picture of a bucket, in both modes");
    let cluster = Cluster::start(args).await?;
    deploy::deploy(&cluster)?;
    run::remove_unfinished(&cluster.kubectl)?;
    let average_size = fill_bucket(&cluster).await?;
    let pipeline = apply_pipeline(&cluster)?;
    show_refusal(&cluster)?;
    let finished = run_to_its_end(&cluster)?;
    make_sheet(&cluster, finished.name()).await?;
    let warm = warm::demo(&cluster).await?;
    step("How much faster is Warm mode?");
    println!("{}", comparison::text(&Measured::of(Mode::PodPerFile, average_size, &finished), &warm));
    look_around(&cluster, finished.name(), &pipeline);
    println!("\nThe demo took {} s.", started.elapsed().as_secs());
    Ok(())
}

/// Stores the pictures; returns their average size in bytes.
async fn fill_bucket(cluster: &Cluster) -> Result<usize> {
    step("Pictures in a bucket");
    let pictures = pictures::all()?;
    cluster.store.seed(CAMERA, &pictures).await?;
    let megabytes = pictures::total_size(&pictures) as f64 / 1e6;
    println!("{} files, {megabytes:.1} MB, below {}", pictures.len(), cluster.store.uri(CAMERA.source));
    println!("One of them, {}{}, was cut off while it was uploaded.", CAMERA.source, pictures::BROKEN);
    Ok(pictures::average_size(&pictures))
}

/// Applies the Pipeline and everything it needs; returns the path of its file.
fn apply_pipeline(cluster: &Cluster) -> Result<String> {
    step("A Pipeline: what to do with every file");
    let kubectl = &cluster.kubectl;
    kubectl.show(&["apply", "-f", &cluster.manifest("namespace.yaml")?])?;
    let secret = std::fs::read_to_string(cluster.paths.root.join("examples/demo/secret.yaml"))?;
    println!("examples/demo/secret.yaml, with the keys of the S3 server in it:");
    kubectl.show_with(&with_keys(&secret, &cluster.keys)?, &["apply", "-f", "-"])?;
    let pipeline = cluster.manifest("pipeline.yaml")?;
    deploy::wait_for_admission(kubectl, &pipeline)?;
    kubectl.show(&["apply", "-f", &pipeline])?;
    Ok(pipeline)
}

/// The Secret with real keys, quoted as JSON, which is also valid YAML.
fn with_keys(secret: &str, keys: &storage::AccessKeys) -> Result<String> {
    let quoted = |key: &storage::Secret| serde_json::to_string(key.reveal());
    Ok(secret
        .replace(": ACCESS_KEY", &format!(": {}", quoted(&keys.id)?))
        .replace(": SECRET_KEY", &format!(": {}", quoted(&keys.secret)?)))
}

fn show_refusal(cluster: &Cluster) -> Result<()> {
    step("A mistake is refused at once, with what to write instead");
    let manifest = cluster.manifest("bad-run.yaml")?;
    cluster.kubectl.show_refused(&["apply", "-f", &manifest])
}

fn run_to_its_end(cluster: &Cluster) -> Result<Finished> {
    step("A PipelineRun: do it now, for every file");
    run::run_to_its_end(&cluster.kubectl, &cluster.manifest("run.yaml")?, pictures::COUNT as i64, 1)
}

async fn make_sheet(cluster: &Cluster, run: &str) -> Result<()> {
    step("The results");
    let results = cluster.store.pictures(CAMERA.results).await?;
    println!("{} files below {}", results.len(), cluster.store.uri(CAMERA.results));
    let broken = format!("{}{}", CAMERA.source, pictures::BROKEN);
    let subtitle = format!("run {run}: {} pictures, 1 dead letter ({broken})", results.len());
    let file = cluster::folder(&cluster.paths).join("contact-sheet.png");
    sheet::PICTURES.sheet(&results, "OpenFilter Pipelines", &subtitle).save(&file)?;
    println!("all of them in one picture: {}", file.display());
    Ok(())
}

fn look_around(cluster: &Cluster, run: &str, pipeline: &str) {
    step("Look around");
    let paths = &cluster.paths;
    if !cluster.is_foreign() {
        println!("export KUBECONFIG={}", paths.kubeconfig().display());
        println!("export PATH={}:$PATH", paths.state().join("bin").display());
    }
    println!("cat {pipeline} examples/demo/run.yaml");
    println!(
        "diff examples/demo/pipeline.yaml examples/demo/warm-pipeline.yaml      # what Warm mode changes"
    );
    println!("kubectl get pipelines,pipelineruns -n {DEMO_NAMESPACE}");
    println!(
        "kubectl describe pipelinerun -n {DEMO_NAMESPACE} {run}      # conditions, events, dead letters"
    );
    println!(
        "kubectl create -f examples/demo/run.yaml && kubectl get plr -n {DEMO_NAMESPACE} -w   # once more"
    );
    println!("kubectl logs -n {} deployment/openfilter-operator", deploy::NAMESPACE);
    if !cluster.is_foreign() {
        let kept = paths.data("s3").join(settings::DEFAULT_BUCKET);
        println!("ls {}      # the bucket, as plain files", kept.display());
    }
    println!(
        "\nEverything is left in place. `make demo` runs the demo again, `make demo DOWN=1` removes everything."
    );
}

fn down(args: &Args) -> Result<()> {
    match args.cluster {
        Where::Testbed => cluster::down_testbed(),
        Where::Current => deploy::remove(&kubectl::Kubectl::of_user(&testbed::Paths::find()?.root)?),
    }
}

/// Prints the title of the next step.
fn step(title: &str) {
    println!("\n== {title} ==");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keys_are_written_so_that_yaml_reads_them_as_they_are() {
        let secret =
            std::fs::read_to_string(testbed::Paths::find().unwrap().root.join("examples/demo/secret.yaml"));
        let keys = storage::AccessKeys { id: "a: b".to_owned().into(), secret: "\"'x".to_owned().into() };
        let filled = with_keys(&secret.unwrap(), &keys).unwrap();
        assert!(filled.contains(r#"accessKeyId: "a: b""#), "{filled}");
        assert!(filled.contains(r#"secretAccessKey: "\"'x""#), "{filled}");
    }
}
