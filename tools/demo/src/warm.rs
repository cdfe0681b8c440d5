//! The second half of the demo: many small pictures in Warm mode, with the filters of the first half.

use crds::v1alpha1::Mode;

use crate::{
    Result,
    cluster::{self, Cluster},
    comparison::Measured,
    pictures,
    run::{self, Finished},
    sheet, step,
    store::TILES,
    tiles,
};

/// The picture whose tiles are shown reassembled.
const SHOWN: usize = 0;

/// Stores the tiles, runs the Pipeline and shows its results.
pub async fn demo(cluster: &Cluster) -> Result<Measured> {
    let average_size = store_tiles(cluster).await?;
    let finished = run_to_its_end(cluster)?;
    show_results(cluster, finished.name()).await?;
    Ok(Measured::of(Mode::Warm, average_size, &finished))
}

/// Stores the tiles; returns their average size in bytes.
async fn store_tiles(cluster: &Cluster) -> Result<usize> {
    step("Many small pictures");
    println!("Some of the pictures are cut into {} tiles and stored; this takes some seconds.", tiles::COUNT);
    let tiles = tiles::all()?;
    cluster.store.seed(TILES, &tiles).await?;
    let megabytes = pictures::total_size(&tiles) as f64 / 1e6;
    println!("{} files, {megabytes:.1} MB, below {}", tiles.len(), cluster.store.uri(TILES.source));
    Ok(pictures::average_size(&tiles))
}

fn run_to_its_end(cluster: &Cluster) -> Result<Finished> {
    step(
        "The same filters in Warm mode: pods stay up, and only the commands of the filters start for each file",
    );
    let pipeline = cluster.manifest("warm-pipeline.yaml")?;
    cluster.kubectl.show(&["apply", "-f", &pipeline])?;
    run::run_to_its_end(&cluster.kubectl, &cluster.manifest("warm-run.yaml")?, tiles::COUNT as i64, 0)
}

async fn show_results(cluster: &Cluster, run: &str) -> Result<()> {
    step("The results of Warm mode");
    let count = cluster.store.count(TILES.results).await?;
    println!("{count} files below {}", cluster.store.uri(TILES.results));
    if count != tiles::COUNT {
        return Err(format!("there should be {} results", tiles::COUNT).into());
    }
    let results = cluster.store.pictures(&format!("{}{}", TILES.results, tiles::folder(SHOWN))).await?;
    let subtitle = format!("run {run}: {} of {count} results", results.len());
    let file = cluster::folder(&cluster.paths).join("warm-sheet.png");
    sheet::TILES.sheet(&results, "OpenFilter Pipelines", &subtitle).save(&file)?;
    println!("those of {} put together: {}", pictures::title(SHOWN), file.display());
    Ok(())
}
